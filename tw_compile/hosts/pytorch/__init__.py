"""Plain PyTorch: ``torch.compile`` with the backend ``tw_compile``, or whatever else has a post-grad slot of Inductor's."""
