from engine_fixtures import engine, ray_session  # noqa: F401
