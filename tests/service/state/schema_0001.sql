-- The service's database as migration 0001 made it, with rows. Frozen: upgrades must take it to the newest schema.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE alias_moves (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant VARCHAR(31) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	name VARCHAR(16) NOT NULL, 
	from_number INTEGER, 
	to_number INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	"by" VARCHAR(64) NOT NULL, 
	reason TEXT NOT NULL
);
INSERT INTO "alias_moves" VALUES(1,'acme','mail','live',2,3,1790000000.0,'job:job_old','better');
CREATE TABLE aliases (
	tenant VARCHAR(31) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	name VARCHAR(16) NOT NULL, 
	number INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	counter INTEGER NOT NULL, 
	moved_at FLOAT NOT NULL, 
	moved_by VARCHAR(64) NOT NULL, 
	reason TEXT NOT NULL, 
	PRIMARY KEY (tenant, task, name)
);
INSERT INTO "aliases" VALUES('acme','mail','live',3,'abababababababababababababababababababababababababababababababab',2,1790000000.0,'job:job_old','better');
CREATE TABLE audit (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant VARCHAR(31) NOT NULL, 
	at FLOAT NOT NULL, 
	actor VARCHAR(64) NOT NULL, 
	action VARCHAR(64) NOT NULL, 
	target TEXT NOT NULL
);
INSERT INTO "audit" VALUES(1,'acme',1790000000.0,'operator','tenant.add','acme');
CREATE TABLE calls (
	tenant VARCHAR(31) NOT NULL, 
	"key" VARCHAR(255) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	token VARCHAR(32) NOT NULL, 
	held_until FLOAT NOT NULL, 
	subject VARCHAR(80), 
	status INTEGER, 
	headers JSON, 
	body BLOB, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (tenant, "key")
);
INSERT INTO "calls" VALUES('acme','once','0000000000000000000000000000000000000000000000000000000000000000','t',1790000060.0,'job_old',202,'{}',X'7B7D',1790000000.0);
CREATE TABLE cohort_members (
	cohort VARCHAR(32) NOT NULL, 
	job INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	PRIMARY KEY (cohort, job), 
	FOREIGN KEY(cohort) REFERENCES cohorts (id)
);
INSERT INTO "cohort_members" VALUES('cohort_old',1,0);
CREATE TABLE cohorts (
	id VARCHAR(32) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	token INTEGER NOT NULL, 
	owner VARCHAR(128) NOT NULL, 
	structure TEXT NOT NULL, 
	lease_until FLOAT NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "cohorts" VALUES('cohort_old','waiting',1,'trainer','train:lora',1790000000.0,1790000000.0);
CREATE TABLE datasets (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant VARCHAR(31) NOT NULL, 
	id VARCHAR(32) NOT NULL, 
	name TEXT NOT NULL, 
	format VARCHAR(16) NOT NULL, 
	file VARCHAR(64) NOT NULL, 
	size_bytes INTEGER NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	num_rows INTEGER NOT NULL, 
	found JSON NOT NULL, 
	task VARCHAR(64), 
	created_at FLOAT NOT NULL, 
	UNIQUE (tenant, id)
);
INSERT INTO "datasets" VALUES(1,'acme','ds_old','mail.csv','csv','ds_old.csv',30,'0000000000000000000000000000000000000000000000000000000000000000',2,'{"columns":[],"reading":null,"problem":null,"notes":[],"first_rows":[]}',NULL,1790000000.0);
CREATE TABLE feedback (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant VARCHAR(31) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	id VARCHAR(32) NOT NULL, 
	text TEXT NOT NULL, 
	pair TEXT, 
	label TEXT NOT NULL, 
	answered TEXT, 
	version INTEGER, 
	"by" VARCHAR(64) NOT NULL, 
	at FLOAT NOT NULL
);
INSERT INTO "feedback" VALUES(1,'acme','mail','fb_old','a text',NULL,'spam',NULL,NULL,'key:abcdefghijkl',1790000000.0);
CREATE TABLE job_events (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	job INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	message TEXT NOT NULL, 
	data JSON NOT NULL, 
	FOREIGN KEY(job) REFERENCES jobs (number)
);
INSERT INTO "job_events" VALUES(1,1,1790000000.0,'queued','','{}');
CREATE TABLE job_files (
	tenant VARCHAR(31) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	path VARCHAR(512) NOT NULL, 
	PRIMARY KEY (tenant, task, path)
);
INSERT INTO "job_files" VALUES('acme','mail','service/runs/acme/x');
CREATE TABLE jobs (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant VARCHAR(31) NOT NULL, 
	id VARCHAR(32) NOT NULL, 
	kind VARCHAR(8) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	dataset VARCHAR(32), 
	state VARCHAR(16) NOT NULL, 
	priority INTEGER NOT NULL, 
	publish VARCHAR(16) NOT NULL, 
	settings JSON NOT NULL, 
	structure TEXT NOT NULL, 
	deaths INTEGER NOT NULL, 
	cohort VARCHAR(32), 
	cancel_requested BOOLEAN NOT NULL, 
	asked_by VARCHAR(64) NOT NULL, 
	progress JSON, 
	result JSON, 
	error JSON, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT, 
	ended_at FLOAT, 
	FOREIGN KEY(cohort) REFERENCES cohorts (id), 
	UNIQUE (tenant, id)
);
INSERT INTO "jobs" VALUES(1,'acme','job_old','train','mail','ds_old','queued',0,'always','{"method":"lora"}','train:lora',1,'cohort_old',0,'key:abcdefghijkl',NULL,NULL,NULL,1790000000.0,NULL,NULL);
CREATE TABLE keys (
	id VARCHAR(12) NOT NULL, 
	tenant VARCHAR(31) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	scopes VARCHAR(64) NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	revoked_at FLOAT, 
	last_used_at FLOAT, 
	PRIMARY KEY (id)
);
INSERT INTO "keys" VALUES('abcdefghijkl','acme','old','0000000000000000000000000000000000000000000000000000000000000000','predict train',1790000000.0,NULL,NULL,NULL);
CREATE TABLE revisions (
	name VARCHAR(32) NOT NULL, 
	value INTEGER NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "revisions" VALUES('hot',0);
INSERT INTO "revisions" VALUES('keys',3);
INSERT INTO "revisions" VALUES('probe',0);
CREATE TABLE tasks (
	tenant VARCHAR(31) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	policy VARCHAR(16) NOT NULL, 
	counter INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (tenant, name)
);
INSERT INTO "tasks" VALUES('acme','mail','active','if-better',4,1790000000.0);
CREATE TABLE tenants (
	name VARCHAR(31) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	weight FLOAT NOT NULL, 
	tokens_per_minute INTEGER, 
	queued_jobs INTEGER, 
	dataset_rows INTEGER, 
	dataset_bytes INTEGER, 
	labels INTEGER, 
	stored_bytes INTEGER, 
	rows_per_request INTEGER, 
	turn FLOAT NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "tenants" VALUES('local','active',1.0,NULL,1000,1000000,1073741824,10000,NULL,1024,0.0,1790000000.0);
INSERT INTO "tenants" VALUES('acme','active',2.0,600000,100,1000000,1073741824,10000,NULL,1024,1.5,1790000000.0);
CREATE TABLE usage (
	tenant VARCHAR(31) NOT NULL, 
	day VARCHAR(10) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	rows INTEGER NOT NULL, 
	tokens INTEGER NOT NULL, 
	requests INTEGER NOT NULL, 
	PRIMARY KEY (tenant, day, task)
);
INSERT INTO "usage" VALUES('acme','2026-09-21','mail',10,100,5);
CREATE TABLE versions (
	tenant VARCHAR(31) NOT NULL, 
	task VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	job VARCHAR(32), 
	dataset VARCHAR(32), 
	size_bytes INTEGER NOT NULL, 
	reason TEXT NOT NULL, 
	published_at FLOAT NOT NULL, 
	PRIMARY KEY (tenant, task, number)
);
INSERT INTO "versions" VALUES('acme','mail',3,'abababababababababababababababababababababababababababababababab','job_old','ds_old',100,'better',1790000000.0);
CREATE INDEX keys_of_tenant ON keys (tenant);
CREATE INDEX calls_by_age ON calls (created_at);
CREATE INDEX audit_of_tenant ON audit (tenant);
CREATE INDEX alias_moves_of_task ON alias_moves (tenant, task);
CREATE INDEX feedback_of_task ON feedback (tenant, task);
CREATE INDEX cohorts_by_state ON cohorts (state);
CREATE INDEX jobs_by_state ON jobs (state, structure);
CREATE INDEX jobs_of_cohort ON jobs (cohort);
CREATE INDEX jobs_of_task ON jobs (tenant, task);
CREATE INDEX members_by_job ON cohort_members (job);
CREATE INDEX events_of_job ON job_events (job, id);
INSERT INTO "sqlite_sequence" VALUES('datasets',1);
INSERT INTO "sqlite_sequence" VALUES('alias_moves',1);
INSERT INTO "sqlite_sequence" VALUES('jobs',1);
INSERT INTO "sqlite_sequence" VALUES('job_events',1);
INSERT INTO "sqlite_sequence" VALUES('feedback',1);
INSERT INTO "sqlite_sequence" VALUES('audit',1);
COMMIT;
