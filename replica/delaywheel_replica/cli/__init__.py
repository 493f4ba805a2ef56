"""The command line tool `delaywheel`: one module a group of commands; none decides anything."""
