"""What is checked on GPUs, by processes of one rank each: ``python tests/gpu/checks --help``, or ``run``."""
