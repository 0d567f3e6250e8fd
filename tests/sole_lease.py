"""A lease for tests with one gateway."""


class SoleLease:
    """Always held."""

    async def hold(self) -> bool:
        return True

    async def release(self) -> None:
        return
