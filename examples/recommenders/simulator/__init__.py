"""A simulated shop: users with tastes that drift, items that come and go, and pages whose clicks are drawn."""
