"""Tables of users in and out: CSV, Excel, Stata, SPSS and Parquet, read as text; nothing here knows
codes.
"""
