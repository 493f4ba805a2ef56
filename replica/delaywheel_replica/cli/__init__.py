"""The command line tool `delaywheel`: one module per group of commands, without decisions."""
