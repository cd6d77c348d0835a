"""What benchmarks, tuning and checks on GPUs share."""
