"""A service's engines and trainers on the machines of a Ray cluster: `inlay serve --on ray`.

Ray only places, restarts and ends processes. Rows go from a web process straight to an engine's port, jobs are claimed
from the database, and Ray keeps no state that is needed.
"""
