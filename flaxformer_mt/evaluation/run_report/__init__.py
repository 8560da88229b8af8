"""The page about one or several runs: `report_runs` reads what the runs have written, and writes HTML."""
