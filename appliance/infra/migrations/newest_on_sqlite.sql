CREATE TABLE api_keys (
	key_id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	admin BOOLEAN NOT NULL, 
	models TEXT, 
	replaces TEXT, 
	created_at BIGINT, 
	expires_at BIGINT, 
	rotated_at BIGINT, 
	revoked_at BIGINT, scopes TEXT, limits TEXT, manage_keys BOOLEAN, made_by TEXT, 
	PRIMARY KEY (key_id)
);
CREATE TABLE approvals (
	id TEXT NOT NULL, 
	expires_at BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE audit_checkpoints (
	size INTEGER NOT NULL, 
	note TEXT NOT NULL, 
	time TEXT NOT NULL, 
	PRIMARY KEY (size)
);
CREATE TABLE audit_cosigned (
	witness TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	time BIGINT NOT NULL, 
	note TEXT NOT NULL, 
	PRIMARY KEY (witness, size)
);
CREATE TABLE audit_disposal (
	id INTEGER NOT NULL, 
	below BIGINT NOT NULL, 
	idx BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE audit_forwarding (
	destination TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	frontier BLOB NOT NULL, 
	sent BIGINT NOT NULL, 
	PRIMARY KEY (destination)
);
CREATE TABLE audit_head (
	id INTEGER NOT NULL, 
	size BIGINT NOT NULL, 
	root BLOB NOT NULL, 
	frontier BLOB NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "audit_head" VALUES(1,0,X'E3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495991B7852B855',X'');
CREATE TABLE audit_kept (
	idx INTEGER NOT NULL, 
	path BLOB NOT NULL, 
	PRIMARY KEY (idx)
);
CREATE TABLE audit_leaves (
	idx INTEGER NOT NULL, 
	leaf BLOB NOT NULL, 
	leaf_hash BLOB NOT NULL, 
	type TEXT NOT NULL, 
	request_id TEXT, 
	PRIMARY KEY (idx)
);
CREATE TABLE audit_migrations (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT audit_migrations_pkc PRIMARY KEY (version_num)
);
INSERT INTO "audit_migrations" VALUES('0013');
CREATE TABLE audit_open_requests (
	request_id TEXT NOT NULL, 
	idx BIGINT NOT NULL, 
	PRIMARY KEY (request_id)
)
 WITHOUT ROWID

;
CREATE TABLE audit_payloads (
	request_id TEXT NOT NULL, 
	part TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	key_id TEXT NOT NULL, 
	nonce BLOB NOT NULL, 
	wrapped_key BLOB NOT NULL, 
	ciphertext BLOB NOT NULL, 
	time TEXT NOT NULL, 
	PRIMARY KEY (request_id, part)
);
CREATE TABLE audit_pending (
	gateway TEXT NOT NULL, 
	seq BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	previous_hash BLOB NOT NULL, 
	leaf BLOB NOT NULL, 
	leaf_hash BLOB NOT NULL, 
	type TEXT NOT NULL, 
	request_id TEXT, 
	PRIMARY KEY (gateway, seq)
);
CREATE TABLE audit_schema (
	version INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "audit_schema" VALUES(1);
CREATE TABLE audit_tile_hashes (
	level INTEGER NOT NULL, 
	number BIGINT NOT NULL, 
	hash BLOB NOT NULL, 
	PRIMARY KEY (level, number)
)
 WITHOUT ROWID

;
CREATE TABLE audit_timestamps (
	size INTEGER NOT NULL, 
	token BLOB NOT NULL, 
	time BIGINT NOT NULL, 
	PRIMARY KEY (size)
);
CREATE TABLE audit_writers (
	gateway TEXT NOT NULL, 
	seen_at DOUBLE NOT NULL, epoch BIGINT DEFAULT '0' NOT NULL, instance TEXT DEFAULT '' NOT NULL, integrated_seq BIGINT DEFAULT '0' NOT NULL, integrated_hash BLOB, 
	PRIMARY KEY (gateway)
);
CREATE TABLE batch_files (
	id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	gateway TEXT NOT NULL, 
	filename TEXT NOT NULL, 
	purpose TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	sealed BOOLEAN NOT NULL, 
	created_at BIGINT NOT NULL, 
	expires_at BIGINT NOT NULL, 
	deleted TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE batches (
	id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	key_id TEXT NOT NULL, 
	gateway TEXT NOT NULL, 
	client TEXT NOT NULL, 
	endpoint TEXT NOT NULL, 
	completion_window TEXT NOT NULL, 
	input_file_id TEXT NOT NULL, 
	output_file_id TEXT, 
	error_file_id TEXT, 
	sealed BOOLEAN NOT NULL, 
	status TEXT NOT NULL, 
	model TEXT, 
	metadata TEXT NOT NULL, 
	errors TEXT NOT NULL, 
	output_seconds BIGINT NOT NULL, 
	total INTEGER NOT NULL, 
	completed INTEGER NOT NULL, 
	failed INTEGER NOT NULL, 
	created_at BIGINT NOT NULL, 
	expires_at BIGINT NOT NULL, 
	in_progress_at BIGINT, 
	finalizing_at BIGINT, 
	completed_at BIGINT, 
	failed_at BIGINT, 
	expired_at BIGINT, 
	cancelling_at BIGINT, 
	cancelled_at BIGINT, 
	PRIMARY KEY (id)
);
CREATE TABLE control_lease (
	name TEXT NOT NULL, 
	holder TEXT NOT NULL, 
	expires_at DOUBLE NOT NULL, 
	epoch BIGINT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE cost_periods (
	start TEXT NOT NULL, 
	gateway TEXT NOT NULL, 
	began_at BIGINT NOT NULL, 
	until BIGINT NOT NULL, 
	flush_seconds BIGINT NOT NULL, 
	closed BOOLEAN NOT NULL, 
	PRIMARY KEY (start)
);
CREATE TABLE cost_shares (
	slot BIGINT NOT NULL, 
	start TEXT NOT NULL, 
	worker TEXT NOT NULL, 
	model TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	engine_us BIGINT NOT NULL, 
	millijoules BIGINT NOT NULL, 
	requests BIGINT NOT NULL, 
	prompt_tokens BIGINT NOT NULL, 
	delivered_tokens BIGINT NOT NULL, 
	draft_tokens BIGINT NOT NULL, 
	accepted_tokens BIGINT NOT NULL, 
	PRIMARY KEY (slot, start, worker, model, tenant)
);
CREATE TABLE cost_workers (
	slot BIGINT NOT NULL, 
	start TEXT NOT NULL, 
	worker TEXT NOT NULL, 
	observed_us BIGINT NOT NULL, 
	busy_us BIGINT NOT NULL, 
	estimated_us BIGINT NOT NULL, 
	gpu_us BIGINT NOT NULL, 
	millijoules BIGINT NOT NULL, 
	busy_millijoules BIGINT NOT NULL, 
	metered_us BIGINT NOT NULL, 
	unknown_power_us BIGINT NOT NULL, 
	draft_us BIGINT NOT NULL, 
	draft_tokens BIGINT NOT NULL, 
	target_only_us BIGINT NOT NULL, 
	target_only_low_us BIGINT NOT NULL, 
	target_only_high_us BIGINT NOT NULL, 
	PRIMARY KEY (slot, start, worker)
);
CREATE TABLE limit_books (
	tenant TEXT NOT NULL, 
	book TEXT NOT NULL, 
	PRIMARY KEY (tenant)
);
CREATE TABLE speculation_override (
	worker TEXT NOT NULL, 
	mode TEXT NOT NULL, 
	draft_tokens INTEGER, 
	actor TEXT NOT NULL, 
	note TEXT NOT NULL, 
	since DOUBLE NOT NULL, 
	expires_at DOUBLE NOT NULL, 
	PRIMARY KEY (worker)
);
CREATE TABLE tenancy_generation (
	id INTEGER NOT NULL, 
	generation BIGINT NOT NULL, mac TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "tenancy_generation" VALUES(1,0,NULL);
CREATE TABLE tenants (
	name TEXT NOT NULL, 
	models TEXT NOT NULL, 
	speculation TEXT NOT NULL, 
	content TEXT NOT NULL, 
	priority TEXT NOT NULL, 
	may TEXT NOT NULL, 
	limits TEXT NOT NULL, 
	disabled BOOLEAN NOT NULL, 
	PRIMARY KEY (name)
);
CREATE UNIQUE INDEX audit_leaves_request_id_type ON audit_leaves (request_id, type);
CREATE INDEX audit_payloads_tenant_time ON audit_payloads (tenant, time);
CREATE TRIGGER audit_leaves_no_update BEFORE UPDATE ON audit_leaves BEGIN SELECT RAISE(ABORT, 'audit leaves are write-once'); END;
CREATE INDEX batch_files_tenant_id ON batch_files (tenant, id);
CREATE INDEX batches_tenant_id ON batches (tenant, id);
CREATE INDEX batches_gateway_status ON batches (gateway, status);
CREATE TRIGGER audit_tile_hashes_no_update BEFORE UPDATE ON audit_tile_hashes BEGIN SELECT RAISE(ABORT, 'audit hashes are write-once'); END;
CREATE TRIGGER audit_tile_hashes_no_delete BEFORE DELETE ON audit_tile_hashes BEGIN SELECT RAISE(ABORT, 'audit hashes are write-once'); END;
CREATE TRIGGER audit_leaves_open AFTER INSERT ON audit_leaves WHEN new.type = 'request.intent' AND new.request_id IS NOT NULL BEGIN INSERT INTO audit_open_requests (request_id, idx) VALUES (new.request_id, new.idx); END;
CREATE TRIGGER audit_leaves_close AFTER INSERT ON audit_leaves WHEN new.type IN ('request.outcome', 'request.aborted') BEGIN DELETE FROM audit_open_requests WHERE request_id = new.request_id; END;
CREATE TRIGGER audit_timestamps_no_update BEFORE UPDATE ON audit_timestamps BEGIN SELECT RAISE(ABORT, 'time stamps are write-once'); END;
CREATE TRIGGER audit_timestamps_no_delete BEFORE DELETE ON audit_timestamps BEGIN SELECT RAISE(ABORT, 'time stamps are write-once'); END;
CREATE UNIQUE INDEX audit_pending_request_id_type ON audit_pending (request_id, type);
CREATE TRIGGER audit_leaves_no_delete BEFORE DELETE ON audit_leaves WHEN old.idx >= coalesce((SELECT max(below) FROM audit_disposal), 0) BEGIN SELECT RAISE(ABORT, 'audit leaves are write-once'); END;
