"""Tables, figures and pages drawn from records."""
