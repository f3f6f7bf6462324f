"""A service's engines and trainers on the machines of a Ray cluster: `inlay serve --on ray`.

Ray places, restarts and ends processes, and nothing else: rows go from a web process straight to an engine's port, jobs
are claimed from the database, and Ray keeps nothing that is needed.
"""
