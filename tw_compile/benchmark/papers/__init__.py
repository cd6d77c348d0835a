"""What papers have claimed, exhibit by exhibit, beside what this package does. No measuring code: benchmarks are asked for it."""
