"""Any layout = one process, as one table: models x layouts x settings x habits, judged by one judge."""
