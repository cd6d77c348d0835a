"""The fused operator beside its peers, timed in one run: ``tw-compile bench kernel``."""
