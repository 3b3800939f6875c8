"""A training service: Tinker's protocol in front of the trainer and the engines.

app, wire, bodies   HTTP: JSON and protobuf in, futures out
requests            what is asked of a model, in the order of its sequence numbers
folders             checkpoints by name: tinker://MODEL/weights/NAME
backend             what all that calls: the port
engine_room         the port over the trainer's ranks and the rollout engines
routes              router decisions of what was sampled, found again by its tokens
"""
