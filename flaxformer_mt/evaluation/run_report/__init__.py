"""The report page: `report_runs` reads the files of one or several runs and writes an HTML page."""
