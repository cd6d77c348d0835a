"""Plain PyTorch: ``torch.compile`` with the backend ``tw_compile``, or anything else that has Inductor's post-grad slot."""
