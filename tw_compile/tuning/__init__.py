"""Tables of this machine's own: what ``tw-compile tune`` measures, and what follows from it."""
