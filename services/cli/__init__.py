"""The command line: reads a recipe, starts the services, shows the run, leaves nothing behind."""
