"""Launchers start and supervise processes; identity, liveness and state are the services' own."""
