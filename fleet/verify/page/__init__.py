"""The report as a page: text, charts of losses and differences, the picture of the first difference."""
