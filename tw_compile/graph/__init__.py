"""Looking at FX graphs: predicates, text, snapshots and differences."""
