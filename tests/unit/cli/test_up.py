from __future__ import annotations

from gpukeeper.agents.config import ABANDON_S, GOODBYE_S
from gpukeeper.cli.siteconfig import SiteConfig
from gpukeeper.cli.up import agent_stop_s


def test_an_agent_is_not_killed_while_it_may_still_hand_its_work_back() -> None:
    config = SiteConfig()

    assert agent_stop_s(config) >= config.agent.stop_grace_s + ABANDON_S + GOODBYE_S + 5
