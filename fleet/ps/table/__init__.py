"""Tables: rows of ids without bound and dense parameters, their rules and how ids are spread over servers."""
