"""One example or more of every command, for its `--help`; the words before the arguments say whose."""

EXAMPLES = """
appliance preflight --config /etc/appliance/appliance.yaml --name llm.hospital.example
appliance up
appliance up --model /srv/models/llama --draft /srv/models/llama-eagle3
appliance gateway --config /etc/appliance/appliance.yaml
appliance worker --config /etc/appliance/appliance.yaml
appliance picker --config /etc/appliance/appliance.yaml
appliance worker-kit /srv/worker-kit
appliance config
appliance version
appliance status
appliance status --once --json
appliance bundle new-key release.key --key-name example.com/releases
appliance bundle build site.yaml out --key a.key --key-name me --key-not-after 2027-12-31 --created 1790000000
appliance bundle diff bundle-1 bundle-2 difference
appliance bundle split bundle /media/usb
appliance bundle join /media/usb bundle
appliance bundle verify /media/usb
appliance bundle plan /media/usb --models /srv/models
appliance bundle load /media/usb --models /srv/models --engine docker
appliance bundle load /media/usb --registry https://registry.example/appliance
appliance bundle copy /media/usb/llama --name llama --models /srv/models
appliance bundle emit bundle --as helm
appliance audit verify
appliance audit verify --held checkpoint.txt --witnesses-needed 2
appliance audit tail -n 50 --purpose "ticket 12"
appliance audit receipt 4711 --leaf entry.json
appliance audit show 4711 --purpose "ticket 12"
appliance audit export audit-2027 --purpose "yearly audit"
appliance audit key
appliance audit erase --tenant ward-7 --before 2026-01-01 --basis "end of purpose"
appliance audit prune --before 2026-01-01
appliance audit hold --tenant ward-7 --reason "case 12"
appliance audit release --tenant ward-7 --reason "case 12 is closed"
appliance audit holds
appliance audit approvals
appliance audit approve 3f2a9c10
appliance audit withdraw 3f2a9c10
appliance audit open REQUEST_ID --part response --purpose "complaint 31"
appliance audit check REQUEST_ID response.json --part response
appliance audit dispose --before 2026-01-01 --basis "retention schedule 7" --yes
appliance audit upgrade-database --url postgresql://owner@db.example/audit --grant-to appliance
appliance audit grants --role appliance
appliance audit migrate --to postgresql://appliance@db.example/audit
appliance audit rotate-key
appliance audit witness init /var/lib/witness --name auditor.example/witness --log log.keys
appliance audit witness key /var/lib/witness
appliance audit witness serve /var/lib/witness --host 10.0.0.9 --port 8090
appliance audit witness cosign /var/lib/witness head.txt
appliance audit witness export-head head.txt
appliance audit witness import head.txt
appliance audit witness status
appliance audit timestamp request log.tsq
appliance audit timestamp import log.tsr
appliance audit timestamp status
appliance egress check
appliance egress attest --json
appliance cost report --from 2026-11 --to 2026-12 --html november.html
appliance tenant create radiology --models demo-coder --limit requests_per_minute=120
appliance tenant set radiology --priority interactive
appliance tenant disable radiology
appliance tenant enable radiology
appliance tenant delete radiology
appliance tenant list
appliance tenant show radiology
appliance tenant import tenants.yaml
appliance tenant export tenants.yaml
appliance tenant seal
appliance key create radiology --expires 90d
appliance key create operator --admin --scope read --scope workers
appliance key rotate k3v7q2ma --overlap 2d
appliance key revoke k3v7q2ma --reason "laptop lost"
appliance key list radiology
appliance speculation drill --repeat 3
appliance speculation status
appliance speculation off --worker worker-1 --for 1h --note "ticket 12"
appliance speculation on --worker worker-1 --draft-tokens 3 --for 1h
appliance speculation auto --worker worker-1
appliance speculation recycle worker-1 --without-draft
appliance workers list
appliance workers drain worker-1 --note "new disk"
appliance workers undrain worker-1
appliance workers reload
appliance draft lint /srv/models/llama /srv/models/llama-eagle3
appliance draft list
appliance draft show 1f0c
appliance draft import /media/usb/llama-eagle3 --target /srv/models/llama
appliance draft key
appliance draft provenance 1f0c
appliance draft harvest --dry-run
appliance draft harvest --purpose "target fine-tuned in March"
appliance draft train --dataset DATASET --minutes 60
appliance draft evaluate 1f0c --dataset DATASET
appliance draft compare prompts.jsonl
appliance draft promote 1f0c
appliance draft rollback --reason "complaint 31"
appliance draft status
""".strip().splitlines()
