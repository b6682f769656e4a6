"""How fast this machine is, measured op by op with torch while as many processes run as a job has."""
