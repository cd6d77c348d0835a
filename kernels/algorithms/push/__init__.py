"""Push: rows go to the peers' inboxes and say of themselves that they have arrived."""
