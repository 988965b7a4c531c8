"""The threats that have a test here or elsewhere in tests/, by the id that its name carries.

An advisory stands for the alike ones beside it in docs/security.md.
"""

ROWS = (
    # media: what is fetched and read
    "CVE-2025-6242",
    "CVE-2026-24779",
    "CVE-2026-25960",
    "CVE-2026-34753",
    "vllm-43117",
    "open-57157",
    "CVE-2026-33626",
    "file-urls",
    "CVE-2026-100650",
    # media: what is decoded
    "CVE-2026-22773",
    "CVE-2026-22778",
    "CVE-2026-54236",
    "CVE-2026-109229",
    "CVE-2026-40192",
    "CVE-2026-5497",
    "CVE-2026-34755",
    "CVE-2026-105758",
    "GHSA-gx7p-2j49-hfq4",
    "CVE-2026-114053",
    "CVE-2026-54233",
    # caches
    "CVE-2025-46722",
    "CVE-2026-111392",
    "CVE-2026-105754",
    "GHSA-ph3r-5jfg-f84f",
    "CVE-2025-46570",
    "CVE-2026-105756",
    "CVE-2025-25183",
    "CVE-2026-112266",
    "CVE-2026-105755",
    # requests
    "CVE-2026-44222",
    "CVE-2025-62372",
    "CVE-2025-62164",
    "PYSEC-2026-2303",
    "CVE-2026-114051",
    "CVE-2026-34756",
    "CVE-2026-73559",
    "CVE-2025-48956",
    "CVE-2025-62426",
    "CVE-2025-61620",
    # keys, transport, code
    "CVE-2025-59425",
    "CVE-2026-48746",
    "open-routes",
    "CVE-2024-9052",
    "CVE-2026-115912",
    "CVE-2026-27893",
    "CVE-2026-41523",
    "log-injection",
)
