from tests.agent.watching import watching as watching
