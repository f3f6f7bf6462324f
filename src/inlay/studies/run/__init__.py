"""Studies at work: what is missing is trained and recorded."""
