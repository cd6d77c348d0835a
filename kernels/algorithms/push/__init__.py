"""Push: rows go to the peers' inboxes, and their words show by themselves that they have arrived."""
