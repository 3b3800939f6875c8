"""Router decisions: the route table and its replay in Megatron-core."""
