"""Scorers that come with Antiphon: each a pure function of one answer, made from its settings."""
