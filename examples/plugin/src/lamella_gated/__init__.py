"""A mixer for Lamella in a package of its own."""
