"""This machine's own tables: what ``tw-compile tune`` measures, and the tables that it derives from the times."""
