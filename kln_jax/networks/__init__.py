"""The paper's networks, and the layers that they are made of."""
