"""A local web page to look at runs with. It reads run directories, and writes nothing into them."""
