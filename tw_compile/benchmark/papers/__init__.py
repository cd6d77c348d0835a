"""What papers have claimed, exhibit by exhibit, beside what this package does. The benchmarks do the measuring."""
