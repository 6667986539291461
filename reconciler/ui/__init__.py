# SPDX-License-Identifier: Apache-2.0
"""The operator's page under `/ui/`: what needs a person, why, and what he decides, in a browser.

Rendered here, without a build step; it works without JavaScript. It shows what the commands show and decides through
the same functions. Recipients are shown on a send's own page only.
"""
