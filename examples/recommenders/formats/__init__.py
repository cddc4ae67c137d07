"""The Parquet files that the models read, and the formats of others that are turned into them."""
