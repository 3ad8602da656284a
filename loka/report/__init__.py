"""The picture: a run's folder as one HTML page, or as text for a terminal.

Python gathers every number and word (``page_data``); the scripts in ``page/`` only draw them.
"""
