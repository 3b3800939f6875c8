from engine_group import ray_session, start  # noqa: F401
