"""Graph passes. Each takes an FX graph after Inductor's post-grad passes and reports what it did."""
