"""Published tables and figures as files that can be run, judged and drawn."""
