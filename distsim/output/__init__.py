"""Everything that distsim prints, writes or draws for people and tools.

Input are finished results: simulations, checks, diagnoses, plans, real runs. No result is computed
here, and only cli, api and testing import this package.

Reports are built in two steps. A view in `text` turns a result into a `report_record.Report`, which
has no layout. `report_text` writes it for a page of any width, `report_html` for notebooks. JSON is
written from the results themselves, because reports round and omit numbers.

Layers, lowest first: text_layout and report_record, report_text and report_html, trace_data, json
and pictures, text, page.
"""
