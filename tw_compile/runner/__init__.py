"""Running a tensor-parallel decoder on real ranks: start them, compile, compare, time."""
