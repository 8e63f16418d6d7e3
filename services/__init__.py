"""The services of Antiphon, and the plumbing they share. Services never import one another."""
