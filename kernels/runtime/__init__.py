"""CUDA C++ kernels: compiled by NVRTC at first use, launched through the driver API. No compiler is needed to install."""
