"""What carries rows between the ranks of a group, one file each."""
