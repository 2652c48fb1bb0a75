/* whale.h: the C ABI of libwhale, the engine for distributed training.
 *
 * Reading order: status, engine, log, tensor, graph, cluster, cancel, event, plan, world, session. A complete program:
 *
 *   engine -> graph (build or load) -> seal -> cluster ("cpu:4") -> plan -> session -> step, step, ... -> save
 *
 * Rules that hold everywhere
 *   Errors     A fallible function returns whale_status *: NULL is success; otherwise the caller owns the status and frees it with
 *              whale_status_release. Out-parameters are untouched on error. No call has a partial effect.
 *   Ownership  A handle that a call hands out belongs to the caller, who releases it once; release functions accept NULL.
 *              Releasing an engine, graph, cluster or plan while something made from it lives is allowed: that keeps what it needs.
 *   Threads    Engine, sealed graph, cluster and plan may be used from any thread at once. An unsealed graph, a session, an event and a log
 *              belong to one thread at a time. whale_cancel_* may be called from any thread at any time. Of a world each rank has a handle
 *              and a session of its own, and a thread or a process: where ranks wait for each other, one thread would wait for itself.
 *   Strings    UTF-8 pointer and length (whale_str). A NULL pointer with length 0 is the empty string. WHALE_STR("text") makes one.
 *   Options    Structs begin with struct_size, which is sizeof of the struct; the _INIT macros set it and leave the rest zero. Zero is the
 *              default of every field and of every enum, so that a zeroed struct with its struct_size set is the same as NULL. Where 0 is
 *              a value too, the field says how it is asked for. A struct may be of an older header of this series, and shorter.
 *   Flags      int32_t, 0 or 1; what is on by default is switched off by a field called no_....
 *   Results    Structs that a call fills begin with struct_size too, which the caller sets; what a newer header has more stays as it was.
 *              Pointers in them live as long as the handle that was asked, unless said otherwise. Text for people and text for programs have functions of their own: what ends in _json gives JSON. Both are a whale_text,
 *              bytes are a whale_bytes.
 *   Dimensions int64_t, row-major; images are channels-last [n, spatial..., c].
 *   Numbers    The caller's rounding mode, flush-to-zero and floating-point traps do not reach what is computed, and are after each
 *              call as they were before it.
 *   Names      A name of an earlier version does not compile or link, and the message has its successor.
 *   The library never exits or installs signal handlers; its threads block all signals. It prints nothing but how far it is, on stderr where
 *   that is a terminal: whale_engine_profile_json, whale_engine_validate_json, and what an option `progress` asks for. Of the environment it reads what its calls
 *   name, when they are called: whale_world_create what launchers set, WHALE_JOB_TOKEN, WHALE_TIMEOUT and WHALE_RUN_TIMEOUT; a run that ends
 *   with an error WHALE_FLIGHT_RECORDER; a first world of several processes has UCX read its own UCX_ variables. After fork()
 *   in the child every call that needs threads of the parent's sessions returns WHALE_FAILED_PRECONDITION (or -1, where it returns a
 *   number); sessions that it opens are its own. No C++ exception leaves any call.
 *   The CPU back end's dependencies read the environment when it is opened (whale_engine_devices, the first session with a CPU
 *   device). What could print, write files or change results is set otherwise then: ONEDNN_ and DNNL_ VERBOSE, JIT_DUMP,
 *   JIT_PROFILE, MAX_CPU_ISA, CPU_ISA_HINTS, DEFAULT_FPMATH_MODE have no effect (the oneDNN settings are the process's: a host that uses
 *   the same libdnnl finds them so, and one that used it before has chosen its instruction set). OMP_DISPLAY_ENV and OMP_DISPLAY_AFFINITY
 *   print, as libgomp does of OMP_ values that it cannot read; the other OMP_ and GOMP_ variables have no effect. In a host that was
 *   linked with libgomp, kernels run on libgomp's threads: OMP_THREAD_LIMIT below a device's threads is WHALE_RESOURCE_EXHAUSTED there,
 *   OMP_PROC_BIND, OMP_PLACES and GOMP_CPU_AFFINITY bind threads to cores, OMP_WAIT_POLICY and GOMP_SPINCOUNT change how they wait,
 *   OMP_STACKSIZE their stacks (WHALE_RESOURCE_EXHAUSTED where the system has no such stacks); none changes a result.
 */
#ifndef WHALE_WHALE_H
#define WHALE_WHALE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define WHALE_API __attribute__((visibility("default")))
#else
#define WHALE_API
#endif

#define WHALE_VERSION_MAJOR 0
#define WHALE_VERSION_MINOR 2
#define WHALE_VERSION_PATCH 0
/* Of this header, as a number that compares as versions do: 2000 for 0.2.0. */
#define WHALE_VERSION_NUMBER (WHALE_VERSION_MAJOR * 1000000 + WHALE_VERSION_MINOR * 1000 + WHALE_VERSION_PATCH)

/* ---- strings --------------------------------------------------------------------------------------------------------------- */
typedef struct whale_str {
  const char *data;
  size_t size;
} whale_str;

#ifdef __cplusplus
#define WHALE_STR(literal) (whale_str{(literal), sizeof(literal) - 1})
#else
#define WHALE_STR(literal) ((whale_str){(literal), sizeof(literal) - 1})
#endif

/* Text made by the library: NUL-terminated, owned by the caller, freed with whale_text_release. */
typedef struct whale_text {
  char *data;
  size_t size; /* without the terminating NUL */
} whale_text;

WHALE_API void whale_text_release(whale_text *text); /* sets it to {NULL, 0}; accepts NULL */

/* Bytes made by the library: owned by the caller, freed with whale_bytes_release. */
typedef struct whale_bytes {
  uint8_t *data;
  size_t size;
} whale_bytes;

WHALE_API void whale_bytes_release(whale_bytes *bytes); /* sets it to {NULL, 0}; accepts NULL */

/* ---- version --------------------------------------------------------------------------------------------------------------- */
typedef struct whale_status whale_status;
/* Of the library: "0.2.0", static; and as a number, as WHALE_VERSION_NUMBER is of the header. */
WHALE_API const char *whale_version(void);
WHALE_API int32_t whale_version_number(void);
/* Whether this library serves programs that were compiled with the header of that version, WHALE_VERSION_NUMBER: before 1.0 when major
 * and minor are the same, from then on when major is; and when it is not older than the header. FAILED_PRECONDITION names both. To be
 * asked before anything else where the library is found at run time (dlopen, ctypes, cgo with a library of the system). */
WHALE_API whale_status *whale_abi_check(int32_t header_version);

/* ---- status ---------------------------------------------------------------------------------------------------------------- */
typedef enum whale_code {
  WHALE_OK = 0,
  WHALE_CANCELLED = 1,
  WHALE_UNKNOWN = 2,
  WHALE_INVALID_ARGUMENT = 3,
  WHALE_DEADLINE_EXCEEDED = 4,
  WHALE_NOT_FOUND = 5,
  WHALE_ALREADY_EXISTS = 6,
  WHALE_PERMISSION_DENIED = 7,
  WHALE_RESOURCE_EXHAUSTED = 8,
  WHALE_FAILED_PRECONDITION = 9,
  WHALE_ABORTED = 10,
  WHALE_OUT_OF_RANGE = 11,
  WHALE_UNIMPLEMENTED = 12,
  WHALE_INTERNAL = 13,
  WHALE_UNAVAILABLE = 14,
  WHALE_DATA_LOSS = 15,
  WHALE_UNAUTHENTICATED = 16
} whale_code;

/* How far the damage goes. */
typedef enum whale_damage {
  WHALE_DAMAGE_CALL = 0,     /* only this call failed; everything is as before */
  WHALE_DAMAGE_STEP = 1,     /* the step did not happen; the session is as before it */
  WHALE_DAMAGE_SESSION = 2,  /* the session cannot go on; make a new one and load a checkpoint */
  WHALE_DAMAGE_PEER_LOST = 3 /* another process is gone */
} whale_damage;

WHALE_API int32_t whale_status_code(const whale_status *status); /* whale_code; WHALE_OK for NULL */
WHALE_API int32_t whale_status_damage(const whale_status *status); /* whale_damage */
/* Each string lives as long as the status. op and scope are empty, rank and device -1 where they do not apply. */
WHALE_API whale_str whale_status_message(const whale_status *status);
WHALE_API whale_str whale_status_op(const whale_status *status);
WHALE_API whale_str whale_status_scope(const whale_status *status);
WHALE_API int32_t whale_status_rank(const whale_status *status);
WHALE_API int32_t whale_status_device(const whale_status *status);
WHALE_API void whale_status_release(whale_status *status);

/* ---- engine: what everything else hangs on --------------------------------------------------------------------------------- */
typedef struct whale_engine whale_engine;

/* Files of strangers. A graph or plan from a file or from bytes is untrusted: what it asks for beyond these limits is refused, by
 * an error that names the option, its value and what was found. Graphs that the process builds itself are free of init_dir and of
 * the limits on files. 0 or empty: the default. */
typedef struct whale_engine_options {
  size_t struct_size;
  whale_str library_dir;  /* folder of libwhale_cpu.so; empty: the folder of libwhale.so */
  whale_str init_dir;     /* folder that WHALE_INIT_FILE of loaded graphs and plans may read, and all below it; "/": everything. Default:
                             the folder of the file that was loaded; nothing for whale_graph_parse and whale_plan_parse */
  int64_t max_file_bytes; /* of a graph or plan, as a file or as bytes; default and most: 2^31 - 1 */
  int64_t max_ops;        /* of a loaded graph or a program of a loaded plan; default 1,000,000 */
  int64_t max_tensors;    /* of a loaded graph, buffers of a program of a loaded plan; default 4,000,000 */
  int64_t max_elements;   /* of all tensors of a loaded graph together; default 2^52 */
  int64_t max_devices;    /* of a cluster or a loaded plan; default and most: 65,536 */
  int64_t max_plan_bytes; /* estimated memory that making a plan takes, for any graph; default 64 GiB */
} whale_engine_options;
#define WHALE_ENGINE_OPTIONS_INIT {sizeof(whale_engine_options), {0, 0}, {0, 0}, 0, 0, 0, 0, 0, 0}

WHALE_API whale_status *whale_engine_create(const whale_engine_options *options /* may be NULL */, whale_engine **out);
WHALE_API void whale_engine_release(whale_engine *engine);
/* Every back end, whether it can be opened and why not, one line each; as a JSON array of {name, available, text}. */
WHALE_API whale_status *whale_engine_devices(whale_engine *engine, whale_text *out);
WHALE_API whale_status *whale_engine_devices_json(whale_engine *engine, whale_text *out);
/* The op table: a JSON array of name, doc, inputs, outputs, attributes. SDK builders are generated from it. */
WHALE_API whale_status *whale_engine_ops_json(whale_engine *engine, whale_text *out);

/* ---- log ------------------------------------------------------------------------------------------------------------------- */
/* What the engine did and what it noticed: plans and their notes, sessions, checkpoints, changes of the loss scale. Nothing is printed:
 * records wait in the engine until they are drained; of more than 1,000 the oldest are dropped, and counted. */
typedef struct whale_log whale_log;

typedef enum whale_severity {
  WHALE_SEVERITY_INFO = 0,
  WHALE_SEVERITY_WARNING = 1
} whale_severity;

typedef struct whale_log_record {
  size_t struct_size;
  int32_t severity;    /* whale_severity */
  int64_t nanoseconds; /* since 1970, UTC */
  whale_str topic;     /* "plan", "session", "checkpoint" */
  whale_str message;
} whale_log_record;
#define WHALE_LOG_RECORD_INIT {sizeof(whale_log_record), 0, 0, {0, 0}, {0, 0}}

/* Takes all records that there are, oldest first; from any thread. */
WHALE_API whale_status *whale_engine_drain_log(whale_engine *engine, whale_log **out);
WHALE_API size_t whale_log_count(const whale_log *log);
WHALE_API int64_t whale_log_dropped(const whale_log *log); /* before the first one, since the log was drained last */
WHALE_API whale_status *whale_log_get(const whale_log *log, size_t index, whale_log_record *out);
WHALE_API void whale_log_release(whale_log *log);

/* ---- data types ------------------------------------------------------------------------------------------------------------ */
/* 0 is no type: in options, the default. */
typedef enum whale_dtype {
  WHALE_F32 = 1,
  WHALE_F64 = 2,
  WHALE_BF16 = 3,
  WHALE_F16 = 4,
  WHALE_I32 = 5,
  WHALE_I64 = 6,
  WHALE_U8 = 7,
  WHALE_I8 = 8,
  WHALE_BOOL = 9,
  WHALE_U16 = 10
} whale_dtype;

/* ---- tensor: data outside a session, exchanged by DLPack ------------------------------------------------------------------- */
/* DLPack 1.x: dlpack.h may be included before this header, after it, or not at all. <whale/dlpack.h> has the structs for programs that
 * have no dlpack.h of their own. */
struct DLManagedTensor;
struct DLManagedTensorVersioned;

typedef struct whale_tensor whale_tensor;

/* Where a tensor's memory is. */
typedef enum whale_placement {
  WHALE_PLACEMENT_HOST = 0,
  WHALE_PLACEMENT_PINNED = 1 /* the host's, page-locked by whoever made it (DLPack's device types 3 and 11) */
} whale_placement;

/* A new tensor with its own zeroed memory. */
WHALE_API whale_status *whale_tensor_create(int32_t dtype, const int64_t *dims, size_t rank, whale_tensor **out);
/* A view of the caller's dense row-major memory, which must outlive the tensor. */
WHALE_API whale_status *whale_tensor_view(int32_t dtype, const int64_t *dims, size_t rank, void *data, whale_tensor **out);
/* Takes ownership of a DLPack tensor, without copying. It must be dense row-major and in memory that the host reads: its own, pinned or not.
 * A tensor of a device is INVALID_ARGUMENT: no device of this version has memory of its own. On error the caller keeps it. */
WHALE_API whale_status *whale_tensor_from_dlpack(struct DLManagedTensorVersioned *dl, whale_tensor **out);
WHALE_API whale_status *whale_tensor_from_dlpack_legacy(struct DLManagedTensor *dl, whale_tensor **out);
/* A DLPack view that shares the tensor's memory and keeps it alive; the caller (or the consumer) calls its deleter. */
WHALE_API whale_status *whale_tensor_to_dlpack(const whale_tensor *tensor, struct DLManagedTensorVersioned **out);
WHALE_API int32_t whale_tensor_dtype(const whale_tensor *tensor);
WHALE_API size_t whale_tensor_rank(const whale_tensor *tensor);
WHALE_API const int64_t *whale_tensor_dims(const whale_tensor *tensor);
WHALE_API void *whale_tensor_data(const whale_tensor *tensor);
WHALE_API int32_t whale_tensor_placement(const whale_tensor *tensor); /* whale_placement */
WHALE_API size_t whale_tensor_bytes(const whale_tensor *tensor);
WHALE_API void whale_tensor_release(whale_tensor *tensor);

/* ---- graph: an ordinary local program -------------------------------------------------------------------------------------- */
typedef struct whale_graph whale_graph;
typedef int32_t whale_value; /* a tensor of one graph; WHALE_NONE: absent */
typedef int32_t whale_scope; /* a scope of one graph; 0: the innermost open one; WHALE_ROOT: outside of all */

#define WHALE_NONE (-1)
#define WHALE_ROOT (-1)

WHALE_API whale_status *whale_graph_create(whale_engine *engine, whale_str name, whale_graph **out);
/* A graph from FlatBuffers bytes (engine/schema/graph.fbs) or a file; verified, sealed. */
WHALE_API whale_status *whale_graph_parse(whale_engine *engine, const void *data, size_t size, whale_graph **out);
WHALE_API whale_status *whale_graph_load(whale_engine *engine, whale_str path, whale_graph **out);
WHALE_API void whale_graph_release(whale_graph *graph);

/* An input. batch_dim: the dimension that counts samples, usually 0; -1: the same for all samples. */
WHALE_API whale_status *whale_graph_input(whale_graph *graph, whale_str name, int32_t dtype, const int64_t *dims, size_t rank,
                                          int32_t batch_dim, whale_value *out);

typedef enum whale_init_kind {
  WHALE_INIT_ZEROS = 0,
  WHALE_INIT_ONES = 1,
  WHALE_INIT_CONSTANT = 2,         /* a */
  WHALE_INIT_NORMAL = 3,           /* mean a, standard deviation b */
  WHALE_INIT_UNIFORM = 4,          /* in [a, b) */
  WHALE_INIT_TRUNCATED_NORMAL = 5, /* mean a, standard deviation b, cut at 2 b */
  WHALE_INIT_FILE = 6,             /* tensor `key` of safetensors file `file`; whale_graph_parameter says where that is */
  WHALE_INIT_DATA = 7              /* the values of `data`, which are copied */
} whale_init_kind;

typedef enum whale_decay {
  WHALE_DECAY_BY_RANK = 0, /* to tensors of rank >= 2 */
  WHALE_DECAY_ALWAYS = 1,
  WHALE_DECAY_NEVER = 2
} whale_decay;

typedef struct whale_parameter_options {
  size_t struct_size;
  int32_t init;             /* whale_init_kind */
  int32_t frozen;           /* 1: not trained */
  double a, b;
  whale_str file, key;
  int32_t decay;            /* whale_decay: whether the optimizer's weight decay applies */
  int32_t buffer;           /* 1: a running statistic, not a parameter */
  whale_scope scope;        /* whose name scopes its name gets */
  const whale_tensor *data; /* with WHALE_INIT_DATA: of the variable's dims, and of its dtype or another floating-point one */
} whale_parameter_options;
#define WHALE_PARAMETER_OPTIONS_INIT {sizeof(whale_parameter_options), 0, 0, 0.0, 0.0, {0, 0}, {0, 0}, 0, 0, 0, 0}

/* A variable. Inside name scopes "block" and "3" its name is "block.3.NAME"; that full name is the one in checkpoints and in
 * whale_session_read. Names are unique in the graph. FILE without a key: the tensor of that full name. The path of a FILE is
 * relative to the working directory in a graph that this process builds, and to the file of the graph or plan that was loaded (see
 * whale_engine_options.init_dir); saving a graph or a plan rewrites it so that it names the same file. */
WHALE_API whale_status *whale_graph_parameter(whale_graph *graph, whale_str name, int32_t dtype, const int64_t *dims, size_t rank,
                                              const whale_parameter_options *options /* may be NULL: zeros */, whale_value *out);
/* A constant from data, of any dtype: a variable that nothing trains, with these values (copied). It is named as a parameter, stands in
 * the files of the graph and of its plans, and in checkpoints among the running statistics. Meant for tables and masks: what is one number
 * everywhere is the op `fill`, which takes no memory. */
WHALE_API whale_status *whale_graph_constant(whale_graph *graph, whale_str name, const whale_tensor *tensor, whale_value *out);

typedef struct whale_group_options {
  size_t struct_size;
  double learning_rate_factor; /* times the learning rate, whatever the schedule; 0: 1 */
  double weight_decay;         /* instead of the optimizer's, to all of the group whatever their rank; 0: the optimizer's */
  int32_t zeros;               /* whale_training_zero of LEARNING_RATE and WEIGHT_DECAY: a 0 that is meant */
} whale_group_options;
#define WHALE_GROUP_OPTIONS_INIT {sizeof(whale_group_options), 0.0, 0.0, 0}

/* A parameter group: the trained parameters that are there now and whose full name matches the pattern (`*`: any text, `?`: one character,
 * else itself: "encoder.*", "*.bias") learn by these options. A later call replaces what an earlier one said of a parameter. NOT_FOUND: no
 * trained parameter matches. */
WHALE_API whale_status *whale_graph_parameter_group(whale_graph *graph, whale_str pattern, const whale_group_options *options);

typedef enum whale_attr_kind {
  WHALE_ATTR_INT = 0,
  WHALE_ATTR_FLOAT = 1,
  WHALE_ATTR_BOOL = 2,
  WHALE_ATTR_STRING = 3,
  WHALE_ATTR_INTS = 4,
  WHALE_ATTR_FLOATS = 5
} whale_attr_kind;

typedef struct whale_attr {
  whale_str name;
  int32_t kind;         /* whale_attr_kind */
  int64_t i;            /* INT, BOOL */
  double f;             /* FLOAT */
  whale_str s;          /* STRING */
  const int64_t *ints;  /* INTS */
  const double *floats; /* FLOATS */
  size_t count;
} whale_attr;

typedef struct whale_op_options {
  size_t struct_size;
  whale_str name;     /* empty: made up */
  whale_str location; /* "model.py:12", shown in errors about this op */
  whale_scope scope;  /* that the op is in */
} whale_op_options;
#define WHALE_OP_OPTIONS_INIT {sizeof(whale_op_options), {0, 0}, {0, 0}, 0}

/* Appends op `op` (whale_engine_ops_json lists them) inside options->scope, else inside the open scopes. An absent optional operand is WHALE_NONE. `outputs`
 * has room for `capacity` values; their number is written to output_count. Types and shapes are checked here: an error has the
 * op's name, its scope, and the location before the message ("model.py:12: matmul: ..."). Names get the prefix of the name
 * scopes, and a number ("matmul_2") when they are taken. */
WHALE_API whale_status *whale_graph_op(whale_graph *graph, whale_str op, const whale_value *inputs, size_t input_count,
                                       const whale_attr *attrs, size_t attr_count, const whale_op_options *options /* may be NULL */,
                                       whale_value *outputs, size_t capacity, size_t *output_count);

/* Type of a value. dims points into the graph and lives until the next call that changes it. */
WHALE_API whale_status *whale_graph_value(const whale_graph *graph, whale_value value, int32_t *dtype, const int64_t **dims, size_t *rank);

/* Every scope has one: there is no default. */
typedef enum whale_scope_kind {
  WHALE_SCOPE_REPLICA = 1,
  WHALE_SCOPE_SPLIT = 2,
  WHALE_SCOPE_STAGE = 3,
  WHALE_SCOPE_PIPELINE = 4,
  WHALE_SCOPE_CLUSTER = 5,
  WHALE_SCOPE_NAME = 6 /* no placement: a prefix of names */
} whale_scope_kind;

/* An option that is given for a scope of another kind than the ones named here is refused. */
typedef struct whale_scope_options {
  size_t struct_size;
  int32_t kind;           /* whale_scope_kind */
  whale_str name;
  int64_t count;          /* replica: count; split: ways; stage: devices; pipeline: stages; 0: inferred */
  const double *shares;   /* replica, split: weights by hand, `count` of them; or rows of `count`, one for each position of the scopes
                             around this one (-1 at a row's end: a smaller group) */
  size_t share_count;
  whale_str by;           /* replica: "sample" (default), "micro_batch" */
  whale_str factor;       /* split */
  int64_t micro_batches;  /* pipeline; at most the batch */
  whale_str schedule;     /* pipeline; a name, with depths of a warm-up behind it where they are given: "1f1b[3,2,1]" */
  int64_t virtual_stages; /* pipeline: on each device */
  whale_str device_order; /* replica, cluster */
  whale_str devices;      /* cluster */
} whale_scope_options;
#define WHALE_SCOPE_OPTIONS_INIT {sizeof(whale_scope_options), 0, {0, 0}, 0, 0, 0, {0, 0}, {0, 0}, 0, {0, 0}, 0, {0, 0}, {0, 0}}

/* Ops appended between begin and end are inside the scope; scopes nest. */
WHALE_API whale_status *whale_graph_scope_begin(whale_graph *graph, const whale_scope_options *options);
WHALE_API whale_status *whale_graph_scope_end(whale_graph *graph);
/* A scope that is not opened: ops and parameters are put into it by its number, whichever scopes are open (options of an op, of a parameter;
 * whale_graph_scope_open).
 * parent: 0: the innermost open one. */
WHALE_API whale_status *whale_graph_scope(whale_graph *graph, whale_scope parent, const whale_scope_options *options, whale_scope *out);
/* Opens a scope by its number, as often as one likes: what is appended until whale_graph_scope_end is inside it and inside the scopes that it was
 * made in, whichever are open. WHALE_ROOT: outside of all. */
WHALE_API whale_status *whale_graph_scope_open(whale_graph *graph, whale_scope scope);
/* Appends ops that compute the gradient of `of` (of the sum of its elements, unless it is a scalar) with respect to each of `by`: inputs,
 * parameters, or what ops have made. They are ordinary ops of the graph: their results can be fetched, go on into other ops, and into a loss,
 * as far as the ops that they consist of have gradients themselves. outputs: room for by_count values; WHALE_NONE where `of` does not depend on
 * one. UNIMPLEMENTED: through ops that are random (dropout), or whose gradient is known to the planner alone (batch_norm). The graph is
 * unchanged after an error. */
WHALE_API whale_status *whale_graph_gradients(whale_graph *graph, whale_value of, const whale_value *by, size_t by_count,
                                              whale_value *outputs);

/* Makes a value fetchable by name. Names of outputs and inputs get no prefix; "loss" is the value that is minimized. */
WHALE_API whale_status *whale_graph_output(whale_graph *graph, whale_str name, whale_value value);

typedef enum whale_optimizer_kind {
  WHALE_OPTIMIZER_SGD = 0,
  WHALE_OPTIMIZER_NONE = 1, /* a loss that is evaluated and nothing else: whale_graph_gradients differentiates */
  WHALE_OPTIMIZER_ADAM = 2,
  WHALE_OPTIMIZER_ADAMW = 3,
  WHALE_OPTIMIZER_LAMB = 4,
  WHALE_OPTIMIZER_ADAGRAD = 5,
  WHALE_OPTIMIZER_ADAFACTOR = 6
} whale_optimizer_kind;

/* The learning rate over updates. */
typedef enum whale_lr_schedule {
  WHALE_LR_CONSTANT = 0,
  WHALE_LR_LINEAR = 1,
  WHALE_LR_COSINE = 2,
  WHALE_LR_INVERSE_SQRT = 3
} whale_lr_schedule;

typedef enum whale_precision {
  WHALE_PRECISION_DEFAULT = 0, /* of a graph: F32; of a plan: the graph's */
  WHALE_PRECISION_F32 = 1,
  WHALE_PRECISION_BF16 = 2,    /* fp32 parameters and state; matmul, convolution and activations in bf16 */
  WHALE_PRECISION_F64 = 3,     /* ref devices only */
  WHALE_PRECISION_F16 = 4      /* as BF16 in f16, with a dynamic loss scale; an overflow skips the update on all devices alike */
} whale_precision;

/* Fields whose default is another number than 0: a bit here says that the 0 there is meant. */
typedef enum whale_training_zero {
  WHALE_ZERO_LEARNING_RATE = 1,
  WHALE_ZERO_BETA1 = 2,
  WHALE_ZERO_BETA2 = 4,
  WHALE_ZERO_EPSILON = 8,
  WHALE_ZERO_DECAY_RATE = 16,
  WHALE_ZERO_WEIGHT_DECAY = 32 /* of a parameter group */
} whale_training_zero;

typedef struct whale_training_options {
  size_t struct_size;
  int32_t optimizer;                 /* whale_optimizer_kind */
  int32_t nesterov;                  /* 1: Nesterov's form of momentum, which must not be 0 */
  int32_t zeros;                     /* whale_training_zero, joined by |: fields that are 0 and mean it; an error where one of them is
                                        not 0 */
  int32_t precision;                 /* whale_precision */
  double learning_rate;              /* 0: 1e-3 */
  double momentum;                   /* sgd; with another optimizer an error unless 0 */
  double beta1, beta2;               /* adam, adamw, lamb; 0: 0.9, 0.999 */
  double epsilon;                    /* 0: 1e-8 of adam and adamw, 1e-6 of lamb, 1e-10 of adagrad, 1e-30 of adafactor */
  double weight_decay;               /* adafactor: p -= weight_decay p, whatever the learning rate; with the others it is multiplied by
                                        it */
  double decay_rate;                 /* adafactor, of the second moments, not above 0; 0: -0.8 */
  double clip_threshold;             /* adafactor, the largest RMS of an update; 0: 1 */
  double clip_norm;                  /* gradients times min(1, clip_norm / (norm + 1e-6)), norm: of all of them; 0: none */
  int32_t lr_schedule;               /* whale_lr_schedule: linear warm-up from 0, then the decay */
  int32_t sparse_updates;            /* 1: only the rows of embedding tables that the step looked up are decayed and updated (sgd, adam,
                                        adamw, adagrad); an error without such a table */
  int64_t warmup_steps, total_steps; /* total_steps: linear and cosine, which need it; an error unless 0 with the others */
  double final_fraction;             /* of the peak, where decay ends; an error unless 0 with the constant schedule */
  int64_t accumulation;              /* micro-batches a step, at most the batch; 0: 1 */
  int32_t split_master_weights;      /* 1: sgd without momentum in bf16: a weight is two halves of one fp32 number, bf16 for the model
                                        and the rest as state. Other precisions have nothing to split: plain sgd */
} whale_training_options;
#define WHALE_TRAINING_OPTIONS_INIT \
  {sizeof(whale_training_options), 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0.0, 0, 0}

/* Declares the scalar `loss` to be minimized; calling it again replaces the loss and the options. NULL: sgd with a learning rate of 1e-3. */
WHALE_API whale_status *whale_graph_minimize(whale_graph *graph, whale_value loss,
                                             const whale_training_options *options /* may be NULL */);
/* Strategy of unannotated ops, as text: "replica(3, shares=[3,2,1])", or with clauses for scopes by name: "head: split(2); replica(2)".
 * Scopes that a clause names must be there when the graph is sealed. */
WHALE_API whale_status *whale_graph_default_strategy(whale_graph *graph, whale_str strategy);
/* Verifies; from here on the graph is immutable and free-threaded. Calling it again does nothing. */
WHALE_API whale_status *whale_graph_seal(whale_graph *graph);
/* What to write: text, JSON, or the FlatBuffers bytes. `level`: "graph" (as built), "train" (after backward and update). */
WHALE_API whale_status *whale_graph_print(const whale_graph *graph, whale_str level, whale_text *out);
WHALE_API whale_status *whale_graph_json(const whale_graph *graph, whale_text *out);
/* A table for people: layers, shapes, parameters, FLOPs. */
WHALE_API whale_status *whale_graph_summary(const whale_graph *graph, whale_text *out);
WHALE_API whale_status *whale_graph_serialize(const whale_graph *graph, whale_bytes *out);
/* Written as a whole, also from many threads and processes at once: a reader sees the file that was there or the new one. */
WHALE_API whale_status *whale_graph_save(const whale_graph *graph, whale_str path);

/* ---- cluster: the devices -------------------------------------------------------------------------------------------------- */
typedef struct whale_cluster whale_cluster;
/* `devices`: item{,item}: cpu:N | cpu@CORES*K | ref:N | lag:N | lag_cpu:N | null:N, e.g. "cpu:4", "cpu@0,cpu@1*2", "ref:3". cpu:N are N devices on the
 * cores of the process; a session takes the least used ones. cpu@CORES are these cores: a plan may name any, a session refuses
 * those that its process may not use. Several machines: nodes
 * joined by |, Nx before one repeats it: "16xnull:8"; or "file:PATH", a text file with a node a line. A kind may say its memory,
 * "null-80GB:8" (B, KB, MB, GB, TB or KiB to TiB): plans take no more of a device, or are refused with WHALE_RESOURCE_EXHAUSTED. */
WHALE_API whale_status *whale_cluster_create(whale_engine *engine, whale_str devices, whale_cluster **out);
WHALE_API size_t whale_cluster_size(const whale_cluster *cluster);

typedef enum whale_device_kind {
  WHALE_DEVICE_CPU = 1,
  WHALE_DEVICE_REF = 2,
  WHALE_DEVICE_NULL = 3,
  WHALE_DEVICE_LAG = 4,
  WHALE_DEVICE_LAG_CPU = 5
} whale_device_kind;

typedef struct whale_device {
  size_t struct_size;
  int32_t kind;         /* whale_device_kind */
  int32_t node;         /* which machine, as listed, from 0 */
  int32_t rank;         /* which device of all, from 0: the index in the list */
  int32_t local_rank;   /* which device of its node, from 0 */
  int64_t memory_bytes; /* that a plan may take; 0: not said */
} whale_device;
#define WHALE_DEVICE_INIT {sizeof(whale_device), 0, 0, 0, 0, 0}

/* One device, index from 0. INVALID_ARGUMENT: there are fewer. */
WHALE_API whale_status *whale_cluster_device(const whale_cluster *cluster, size_t index, whale_device *out);
WHALE_API void whale_cluster_release(whale_cluster *cluster);

/* ---- cancel ---------------------------------------------------------------------------------------------------------------- */
typedef struct whale_cancel whale_cancel;
/* A token for plans and runs. Cancelling stops all planning and every run that was given it, also what starts later; any thread,
 * any number of times. A step that has begun to write variables is completed: its event then says success, else WHALE_CANCELLED and
 * nothing has changed. */
WHALE_API whale_status *whale_cancel_create(whale_cancel **out);
WHALE_API void whale_cancel_trigger(whale_cancel *cancel);
WHALE_API void whale_cancel_release(whale_cancel *cancel);

/* ---- event: what is under way ---------------------------------------------------------------------------------------------- */
typedef struct whale_event whale_event;
/* Waits until the run (a step, an evaluation, planning, saving, loading) has ended; timeout in seconds, negative: forever. done: 1 once it
 * has, whatever its status, which is what is returned then; a timeout is not an error (done = 0). */
WHALE_API whale_status *whale_event_wait(whale_event *event, double timeout_seconds, int32_t *done);
/* Waits until one of `count` events has ended. index: the first in the array that has, -1: none within the timeout. How it ended
 * whale_event_wait says. NULL among them is left out; INVALID_ARGUMENT: nothing else is. */
WHALE_API whale_status *whale_event_wait_any(whale_event *const *events, size_t count, double timeout_seconds, int64_t *index);
WHALE_API int32_t whale_event_query(const whale_event *event); /* 1: ended */
/* Waits for the run if it has not ended. */
WHALE_API void whale_event_release(whale_event *event);

/* ---- plan: what every device does ------------------------------------------------------------------------------------------ */
typedef struct whale_plan whale_plan;

typedef struct whale_plan_options {
  size_t struct_size;
  whale_str strategy;             /* replaces the graph's default strategy; empty: the graph's; "auto": searched for */
  const whale_str *fetch;         /* besides the graph's outputs: tensor names, "grad:PARAMETER" */
  size_t fetch_count;
  int64_t bucket_bytes;           /* gradient buckets; 0: 4 MiB */
  int64_t accumulation;           /* micro-batches, at most the batch; 0: the graph's */
  int32_t precision;              /* whale_precision; 0: the graph's */
  int32_t no_overlap;             /* 1: communication on the compute queue, for comparison */
  int32_t no_fusion;              /* 1: no fusion groups, for comparison */
  int32_t zero;                   /* ZeRO (Rajbhandari et al., 2020): 1 cuts optimizer state over replicas, 2 gradients too, 3 parameters
                                     too */
  const double *state_shares;     /* of state that ZeRO or sliced updates cut, a weight per replica; NULL: equal */
  size_t state_share_count;
  int32_t recompute;              /* whale_recompute: activations computed again for the backward pass instead of kept */
  int32_t gradient_dtype;         /* whale_dtype that gradients are summed in between devices (F32, BF16, F16); 0: as they are */
  int32_t adasum;                 /* 1: gradients of replicas are combined by Adasum (Maleki et al., 2021) instead of summed */
  int32_t exact;                  /* 1: bitwise equal results for any replicas of whole micro-batches, pipeline, schedule, ZeRO,
                                     recompute */
  whale_str offload;              /* what waits in the host's memory: state, gradients, parameters, activations, joined by commas; empty:
                                     nothing */
  int32_t update;                 /* whale_update: how replicas update what all of them hold; the bits are the same */
  int64_t matmul_chunks;          /* of a product whose collective runs beside it; 0: chosen by cost, 1: none */
  const int32_t *stage_recompute; /* whale_recompute of each pipeline stage, in the model's order; NULL: `recompute` for all */
  size_t stage_recompute_count;
  whale_cancel *cancel;           /* stops planning with WHALE_CANCELLED; may be released once the call returns. NULL: none */
  double timeout_seconds;         /* of planning, which ends with WHALE_DEADLINE_EXCEEDED; 0: none */
  int64_t prefetch;               /* ZeRO 3: gathers of parameters ahead of the one that is read; 0: by the cost model */
  int32_t accumulate_dtype;       /* whale_dtype that gradients are summed in over micro-batches (F32, BF16, F16); 0: as they are */
  const int64_t *train_batches;   /* other batch sizes that steps will have, at most the graph's: the plan has their entries too, also as
                                     a file */
  size_t train_batch_count;
  const int64_t *eval_batches;    /* of evaluations, of any size */
  size_t eval_batch_count;
  whale_str profile;              /* JSON: figures of the machine by name, or what whale_engine_probe_json, whale_engine_profile_json or
                                     whale_engine_profile_import_json gave, or file:PATH of such a file, which messages then name; empty:
                                     those of devices that nobody has measured. A plan keeps them */
  int32_t objective;              /* whale_objective of strategy "auto" */
  double most_price;              /* of a step that "auto" may choose, in the currency of the devices' prices; 0: any */
  double least_throughput;        /* samples a second that "auto" may choose; 0: any */
  double search_seconds;          /* that "auto" searches for, about; 0: 10 */
  int32_t ranks;                  /* processes that the devices are of, in even runs: "auto" uses all devices then, as they are listed;
                                     0: 1 */
  whale_str present;              /* a strategy that the model has now: "auto" looks at what is near it and nothing else, for a device
                                     lost, added or slower; empty: none */
  int32_t quick;                  /* 1: an estimate among many: of models with many like layers a third of the time, where one layer more
                                     is not asked whether it says the same: of shallow models and pipelines one in six is then more than
                                     2 % off, to rank by and not to fill devices by */
} whale_plan_options;
#define WHALE_PLAN_OPTIONS_INIT \
  {sizeof(whale_plan_options), {0, 0}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0, 0}, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, {0, 0}, 0, 0.0, 0.0, 0.0, 0, {0, 0}, 0}

typedef enum whale_objective {
  WHALE_OBJECTIVE_THROUGHPUT = 0, /* the fastest step */
  WHALE_OBJECTIVE_PRICE = 1       /* the cheapest step, by what the devices cost an hour */
} whale_objective;

typedef enum whale_update {
  WHALE_UPDATE_BY_COST = 0,
  WHALE_UPDATE_WHOLE = 1, /* all_reduce of the gradient, then everybody updates everything */
  WHALE_UPDATE_SLICED = 2 /* reduce_scatter, an update of the own slice, all_gather (Jangda et al., 2022) */
} whale_update;

typedef enum whale_recompute {
  WHALE_RECOMPUTE_NONE = 0,
  WHALE_RECOMPUTE_SELECTIVE = 1, /* what is cheap to compute again */
  WHALE_RECOMPUTE_FULL = 2       /* every block from its inputs (Chen et al., 2016) */
} whale_recompute;

/* Options of training (accumulation, bucket_bytes, train_batches, zero, state_shares, recompute, gradient_dtype, accumulate_dtype, adasum, update, offload of anything but parameters) are INVALID_ARGUMENT for a graph without a loss and an optimizer. */
WHALE_API whale_status *whale_plan_create(whale_engine *engine, const whale_graph *graph, const whale_cluster *cluster,
                                          const whale_plan_options *options /* may be NULL */, whale_plan **out);
/* The same on a thread of the library: the event ends when the plan is made, and whale_event_plan gives it. Graph, cluster and options may
 * be released as soon as the call returns; options->cancel stops it. What is wrong with the arguments is an error of this call, what is
 * wrong with the plan is the event's. */
WHALE_API whale_status *whale_plan_create_async(whale_engine *engine, const whale_graph *graph, const whale_cluster *cluster,
                                                const whale_plan_options *options /* may be NULL */, whale_event **out);
/* The plan that whale_plan_create_async made, a new handle each time. FAILED_PRECONDITION: it is not made yet, or the event is of something
 * else; the event's own error when planning ended with one. */
WHALE_API whale_status *whale_event_plan(whale_event *event, whale_plan **out);
/* What the plan would take, without making it: seconds of a step by the cost model, and of each class of devices (those whose parts
 * have the same sizes) the bytes by what they hold and the seconds of its own work. Takes what whale_plan_create takes and refuses what
 * that refuses, but for a lack of memory, which it tells. It is of the graph's own batch alone: other sizes (train_batches, eval_batches) are
 * looked at for their range. Memory is what the plan would say, of models with many like layers within 2 %; where the evaluation alone
 * needs memory to be dearer, the plan's training holds less. Seconds leave out what waits for what: the plan's timeline is longer. */
WHALE_API whale_status *whale_plan_estimate(whale_engine *engine, const whale_graph *graph, const whale_cluster *cluster,
                                            const whale_plan_options *options /* may be NULL */, whale_text *out);
WHALE_API whale_status *whale_plan_estimate_json(whale_engine *engine, const whale_graph *graph, const whale_cluster *cluster,
                                                 const whale_plan_options *options /* may be NULL */, whale_text *out);
/* A plan is verified when it is read. INVALID_ARGUMENT or DATA_LOSS: it is no plan file, or a damaged one. FAILED_PRECONDITION: it is a plan that
 * contradicts itself (a wait is missing, two values share bytes, devices do not agree on a collective, ...) and would not run. */
WHALE_API whale_status *whale_plan_parse(whale_engine *engine, const void *data, size_t size, whale_plan **out);
WHALE_API whale_status *whale_plan_load(whale_engine *engine, whale_str path, whale_plan **out);
WHALE_API whale_status *whale_plan_serialize(const whale_plan *plan, whale_bytes *out);
/* Written as a whole, as whale_graph_save does. */
WHALE_API whale_status *whale_plan_save(const whale_plan *plan, whale_str path);
WHALE_API whale_status *whale_plan_print(const whale_plan *plan, whale_text *out); /* every instruction */
WHALE_API whale_status *whale_plan_summary(const whale_plan *plan, whale_text *out); /* fits a terminal */
WHALE_API whale_status *whale_plan_json(const whale_plan *plan, whale_text *out);
/* What moves between devices in a step, most expensive first: tensor, shardings, bytes and estimated seconds of each reshard, and what
 * the other legal ways would cost. Plans once more, under the timeout that the plan was made with, and the cancel token of whale_plan_create. */
WHALE_API whale_status *whale_plan_reshards(const whale_plan *plan, whale_text *out);
WHALE_API whale_status *whale_plan_reshards_json(const whale_plan *plan, whale_text *out);
/* Every cut of the plan, as it was chosen before anything was moved: for each op the factor that it is cut by along each axis, the
 * shardings of its results, and its price in seconds of a step by the cost model (arithmetic, and what moves its operands); the storage shardings
 * of variables; the price of the whole. Plans once more, as whale_plan_reshards does. */
WHALE_API whale_status *whale_plan_choices(const whale_plan *plan, whale_text *out);
WHALE_API whale_status *whale_plan_choices_json(const whale_plan *plan, whale_text *out);
/* What strategy "auto" looks through for a model and a cluster: JSON with `fits`, `candidates` (the best first; of each `strategy`, `options`,
 * `accumulation`, `zero`, `recompute`, `offload`, `devices` of the cluster, also as `devices_text`, `seconds` of a step, `simulated`, `bytes` of the fullest device, `missing_bytes`, `price` of a step, and `lost`: why
 * it is not the winner), `not_tried`, and `pareto`: those of which none is both faster and cheaper. Needs no device. options->strategy is not
 * looked at; cancel and timeout_seconds stop it. */
WHALE_API whale_status *whale_plan_search_json(whale_engine *engine, const whale_graph *graph, const whale_cluster *cluster,
                                               const whale_plan_options *options /* may be NULL */, whale_text *out);
/* The same as a table for a terminal. */
WHALE_API whale_status *whale_plan_search(whale_engine *engine, const whale_graph *graph, const whale_cluster *cluster,
                                          const whale_plan_options *options /* may be NULL */, whale_text *out);
/* The best strategy for the first so many devices of a cluster and for each batch size, as whale_plan_search_json finds it: JSON, a list with a
 * row for each count and batch: `devices`, `batch`, `strategy`, `options`, `seconds`, `samples_per_second`, `bytes`, `price`; or `error` where
 * nothing fits. `batches` of none: the graph's own. */
WHALE_API whale_status *whale_plan_predict_json(whale_engine *engine, const whale_graph *graph, const whale_cluster *cluster,
                                                const whale_plan_options *options /* may be NULL */,
                                                const int64_t *counts /* of devices */, size_t count_count,
                                                const int64_t *batches /* samples of a step */, size_t batch_count, whale_text *out);
/* One step of the plan's first entry as the simulator walks it, instruction for instruction: JSON with `seconds`, `instructions`, `walk_seconds`, and
 * `classes` of devices that do the same at the same time: `devices`, `compute_seconds`, `phases`, `communication_seconds`, `hidden_seconds` of it
 * (beside computation), `idle_seconds`. RESOURCE_EXHAUSTED: more than 2^26 instructions of unlike devices. */
WHALE_API whale_status *whale_plan_simulate_json(const whale_plan *plan, whale_text *out);
/* One step of the plan's first entry as the simulator has it, in the format of whale_session_timeline_json (which has that of a run): a process
 * for each class of devices that do the same at the same time, a thread for each queue. UNIMPLEMENTED for steps of more than a million
 * instructions of different devices. */
WHALE_API whale_status *whale_plan_timeline_json(const whale_plan *plan, whale_text *out);
/* The same as a table for a terminal. */
WHALE_API whale_status *whale_plan_simulate(const whale_plan *plan, whale_text *out);
/* One HTML page for a browser, which needs no network and no other file: the cluster with each device's load and memory, a timeline of one step,
 * shares and why, reshards with bytes. traces: what whale_session_timeline_json said of runs of this plan, one for each rank: the page shows the
 * measured step beside the predicted one; may be NULL with trace_count 0. Text that is no timeline of this plan is INVALID_ARGUMENT. Plans once more, as whale_plan_reshards does. */
WHALE_API whale_status *whale_plan_report_html(const whale_plan *plan, const whale_str *traces, size_t trace_count, whale_text *out);

typedef struct whale_proof_options {
  size_t struct_size;
  whale_cancel *cancel;   /* stops the proof with WHALE_CANCELLED; may be released once the call returns. NULL: none */
  double timeout_seconds; /* of the proof, which ends with WHALE_DEADLINE_EXCEEDED; 0: none */
  int32_t progress;       /* 1: a bar on stderr, where that is a terminal and it takes more than a second */
} whale_proof_options;
#define WHALE_PROOF_OPTIONS_INIT {sizeof(whale_proof_options), 0, 0.0, 0}

/* Is the plan equal to the one-device program of its source? Found without running it or opening a device, of each entry (docs/proof.md). JSON:
 * `verdict`: "proven", "refuted", or "not covered" (there is no rule for something in it: nothing is said); `text`: lines for a person; `program`: a
 * hash of the source, "" where the plan contradicts itself; `entries`:
 * of each `entry`, `batch`, `verdict`, `what` (proven: the statement; else what was expected and found, or has no rule), `construct` that has no
 * rule, `walked` instructions, `path`: who made what it reads, and `at`, as far as it is known: `device`, `segment`, and where an instruction is
 * the reason its `number`, `verb`, `instruction`, `scope`, `micro_batch` (-1: the segment runs once). An entry that is proven in exact mode has an `order`: those of two plans of one program that have the same give the same bits; `orders` has the same of each variable and output, by name. A verdict is no error. */
WHALE_API whale_status *whale_plan_prove_json(const whale_plan *plan, const whale_proof_options *options /* may be NULL */,
                                              whale_text *out);
/* The same, under the timeout that the plan was made with, and the cancel token of whale_plan_create. */
WHALE_API whale_status *whale_plan_prove(const whale_plan *plan, whale_text *out);
/* As whale_plan_prove_json, of a plan file, also of one that contradicts itself or its model, which whale_plan_load does not take: it is refuted, with device,
 * instruction and who made what that reads. Errors are those of a file that is no plan or is damaged otherwise, and of whale_plan_prove_json. */
WHALE_API whale_status *whale_plan_file_prove_json(whale_engine *engine, whale_str path,
                                                   const whale_proof_options *options /* may be NULL */, whale_text *out);
/* The devices of a plan, in its order. */
WHALE_API size_t whale_plan_device_count(const whale_plan *plan);
WHALE_API whale_status *whale_plan_device(const whale_plan *plan, size_t index, whale_device *out);

typedef enum whale_run {
  WHALE_RUN_STEP = 0,
  WHALE_RUN_EVAL = 1
} whale_run;

/* What devices do in a run of one batch size: of the graph's own, and of what was asked for with the plan. */
typedef struct whale_entry {
  size_t struct_size;
  int32_t run;          /* whale_run */
  int32_t planned_here; /* 1: a session planned it, in a run or ahead of it; 0: the plan has it */
  int64_t batch;        /* samples */
} whale_entry;
#define WHALE_ENTRY_INIT {sizeof(whale_entry), 0, 0, 0}

WHALE_API size_t whale_plan_entry_count(const whale_plan *plan);
WHALE_API whale_status *whale_plan_entry(const whale_plan *plan, size_t index, whale_entry *out);

/* Bytes of one device by what they hold. An arena is split up as it is at its fullest. Of a plan: in a run of the graph's own batch; a
 * session's arena is that of the largest batch size that it has. */
typedef struct whale_memory {
  size_t struct_size;
  int64_t parameters;
  int64_t gradients;   /* and their sums */
  int64_t state;       /* of the optimizer */
  int64_t buffers;     /* running statistics */
  int64_t copies;      /* of variables that live in the host's memory; of a plan */
  int64_t inputs;      /* of a session; in a plan they are activations */
  int64_t activations; /* the rest of the arena */
  int64_t workspace;   /* of kernels; of a session */
  int64_t host;        /* in the host's memory instead (offload) */
  int64_t total;       /* of the device, without `host` */
} whale_memory;
#define WHALE_MEMORY_INIT {sizeof(whale_memory), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* What a step takes of one device of the plan. INVALID_ARGUMENT: there are fewer devices. */
WHALE_API whale_status *whale_plan_memory(const whale_plan *plan, size_t device, whale_memory *out);

/* The same plan in float64: the devices are reference ones, every group, transfer and instruction stays, and nothing rounds to fewer
 * bits. What a plan in float32 or 16 bits computes wrongly, this one does too, and no rounding hides it (`whale verify`). Its float
 * inputs are WHALE_F64. WHALE_UNIMPLEMENTED for split weights. */
WHALE_API whale_status *whale_plan_in_float64(const whale_plan *plan, whale_plan **out);
WHALE_API void whale_plan_release(whale_plan *plan);

/* ---- world: ranks that run plans together ---------------------------------------------------------------------------------- */
/* Several ranks (processes, or parts of one) run one plan: each opens a session of it (whale_session_options.world) that holds the devices
 * which are the rank's, with their parts of variables and nothing of the others'. A handle is one rank's, and belongs to the caller, who
 * releases it once; sessions keep what they need of it. It may be used from any thread. It serves any number of sessions, one after another or at once: the n-th session of
 * every rank are one.
 * All ranks make the same calls in the same order: whale_session_create (which waits until all have called it, and is FAILED_PRECONDITION on
 * every rank when plans, options or versions of libwhale are not the same), then steps, evaluations, reads, saves and loads. Each rank feeds whole
 * batches, of which it takes its devices' samples, or what its devices read of them alone (whale_session_run_slices), and asks for the same
 * outputs as the others; every rank gets them whole. A rank that fails, cancels, closes its session, or runs something else, ends the run on all ranks, with a status whose rank it is and the variables
 * as they were; WHALE_DAMAGE_PEER_LOST: the update had begun. */
typedef struct whale_world whale_world;

/* How this process finds the others of its job. `size` 0: as its launcher says in the environment, the first that is there of: RANK, WORLD_SIZE,
 * MASTER_ADDR and MASTER_PORT (torchrun, `whale launch`), those of a step of Slurm (srun), those of OpenMPI (mpirun); where there are none this
 * process is alone. WHALE_JOB_TOKEN, WHALE_TIMEOUT and WHALE_RUN_TIMEOUT in the environment stand for an empty `token`, a `timeout_seconds` of 0
 * and a `run_timeout_seconds` of 0. */
typedef struct whale_world_options {
  size_t struct_size;
  int32_t rank;               /* of this process, from 0; with a size */
  int32_t size;               /* processes; 0: rank, size, address, port are the environment's */
  whale_str address;          /* of rank 0's host, which listens there and nowhere else; empty: 127.0.0.1 */
  int32_t port;               /* that rank 0 listens on; with a size of 2 or more */
  whale_str token;            /* a secret of the job, at most 64 bytes: who does not know it is not let in; empty: whoever reaches the
                                 port may join */
  double timeout_seconds;     /* until a process that does not come, or is silent, is given up; 0: 30 */
  whale_cancel *cancel;       /* ends the wait for the others with WHALE_CANCELLED; may be released once the call returns. NULL: none */
  double run_timeout_seconds; /* until a run ends in which nothing moves: a rank is there and has not begun it, or what was sent does not
                                 arrive; 0: 600. After `timeout_seconds` the log has a warning */
} whale_world_options;
#define WHALE_WORLD_OPTIONS_INIT {sizeof(whale_world_options), 0, 0, {0, 0}, 0, {0, 0}, 0.0, 0, 0.0}

/* This process's rank among the processes of its job. Waits until all of them have called it, for `timeout_seconds` each. From then on a process
 * that ends without releasing its world, or that is silent for so long, is lost: the runs of all others end with a status whose rank it is
 * (UNAVAILABLE; WHALE_DAMAGE_STEP, or WHALE_DAMAGE_PEER_LOST where nobody knows whether the update was made), and so do those that begin
 * later. A run in which nothing moves for `run_timeout_seconds`, and no rank is at work, ends on all ranks with DEADLINE_EXCEEDED, whose rank is
 * the first that has not begun it, where one has not: variables are as before, the call that the late rank makes for it ends likewise, and the
 * next ones meet. Bytes go over UCX (libwhale_ucx.so beside libwhale.so), which is opened with the second process: by shared memory inside a host, by
 * what UCX chooses between hosts. They are not encrypted.
 * DEADLINE_EXCEEDED: a process has not come. UNAUTHENTICATED: another token. FAILED_PRECONDITION: another size, or two of one rank.
 * UNAVAILABLE: no address to listen on, no UCX, no PMIx where the launcher speaks it. INVALID_ARGUMENT: options or an environment that mean nothing. */
WHALE_API whale_status *whale_world_create(whale_engine *engine, const whale_world_options *options /* may be NULL: the environment */,
                                           whale_world **out);

/* `ranks` ranks in this process, which share a store of keys and flat messages and nothing else: how a plan for several processes is tried without
 * them. `out`: room for that many handles, in the order of the ranks. One rank: as without a world. */
WHALE_API whale_status *whale_world_create_inproc(int32_t ranks, whale_world **out);
WHALE_API int32_t whale_world_rank(const whale_world *world); /* from 0; -1 for NULL */
WHALE_API int32_t whale_world_size(const whale_world *world); /* the number of ranks; 0 for NULL */
/* The rank that a device of a plan is of: even runs of devices, in the order of the plan. INVALID_ARGUMENT: there are fewer devices, or so
 * few that a rank would have none. */
WHALE_API whale_status *whale_world_device_rank(const whale_world *world, const whale_plan *plan, size_t device, int32_t *out);
WHALE_API void whale_world_release(whale_world *world);
/* Measures the devices of a cluster and what is between them, all at once, with the kernels and transports of steps: JSON with `devices`
 * (flops_per_second by dtype and size of a square product, bytes_per_second, host), `links` of all pairs (bytes_per_second,
 * latency_seconds), `gather` (of all devices) and `profile`, for whale_plan_options. Some seconds, more with many devices. `world`: all ranks
 * call it with the devices of all of them, and each gets the same text. UNIMPLEMENTED: devices that compute nothing, or are there for tests. */
WHALE_API whale_status *whale_engine_probe_json(whale_engine *engine, const whale_cluster *cluster, whale_world *world /* may be NULL */,
                                                whale_cancel *cancel /* may be NULL */, whale_text *out);
/* Runs steps of a model on each device of a cluster by itself, all of them at once, and gives what its ops took by kind of device and local
 * batch, for `profile` of whale_plan_options: JSON with `schema`, `units`, `model`, `devices` and the `profile` of a probe (docs/profiles.md).
 * `options`: precision, cancel and timeout of planning are looked at. `samples`: local batches, at most the graph's own; none: that, a half, a
 * quarter of it, and so on. Each takes about `seconds`; 0: 1. UNIMPLEMENTED: devices that compute nothing, or are there for tests. */
WHALE_API whale_status *whale_engine_profile_json(whale_engine *engine, const whale_graph *graph, const whale_cluster *cluster,
                                                  const whale_plan_options *options /* may be NULL */, const int64_t *samples,
                                                  size_t sample_count, double seconds, whale_text *out);
/* What others measured, in that form: Sailor's and Metis's profiles of layers, or a table of ops with the columns set, op, gpu, B, M, N, K, H, ms.
 * `path`: a file, of Metis also a folder; `device`: the device type whose times they are, where the file does not say. */
WHALE_API whale_status *whale_engine_profile_import_json(whale_engine *engine, whale_str path, whale_str device, whale_text *out);
/* What libwhale's cost model and planner say of rows that somebody measured (docs/validation.md): JSON with `form`, `rows`, what that form
 * measures (`mean_absolute_error_percent`, `spearman`, `regret`), `groups` and `text`, lines for a person. `path`: a file; `form`: empty for the
 * one that the file's columns tell; `profiles`: a folder that the form reads besides, may be empty. Runs nothing. */
WHALE_API whale_status *whale_engine_validate_json(whale_engine *engine, whale_str path, whale_str form, whale_str profiles,
                                                   whale_text *out);

/* ---- session: a plan on real devices --------------------------------------------------------------------------------------- */
typedef struct whale_session whale_session;

typedef struct whale_session_options {
  size_t struct_size;
  uint64_t seed;             /* of initializers and random ops */
  int32_t nan_policy;        /* 0: a non-finite loss is an error that names the step; 1: let it pass */
  int32_t threads;           /* per CPU device; 0: its share of the cores */
  double loss_scale;         /* precision f16: of the first step, 2^-14 to 2^24; 0: 65536. An error with other precisions */
  int64_t loss_scale_growth; /* precision f16: steps without an overflow until it doubles; 0: 2000. An error with other precisions */
  int32_t no_pin;            /* 1: threads of CPU devices run wherever the calling thread may; 0: each device's on its own cores */
  int32_t no_bf16;           /* 1: CPU devices multiply bf16 in f32, as on processors without instructions for it; 0: with those there
                                are */
  whale_world *world;        /* the ranks that run this plan; NULL: all its devices are here */
  int32_t plan_in_run;       /* 1: a step or evaluation of a size that has no entry plans it, which takes its time; 0: it is
                                FAILED_PRECONDITION */
  whale_cancel *cancel;      /* ends the wait for the other ranks with WHALE_CANCELLED, which they are told; may be released once the
                                call returns. NULL: none */
} whale_session_options;
#define WHALE_SESSION_OPTIONS_INIT {sizeof(whale_session_options), 0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0}

/* Opens the devices, makes their threads, allocates everything, binds the kernels of all of the plan's entries, initializes the variables. Sessions of one engine take cores that the
 * fewest of them use; `no_pin` takes none. A plan that needs more memory than the machine and the control groups of the process have left
 * is refused before any is taken (WHALE_RESOURCE_EXHAUSTED; null devices need none). What the system does not give (threads, memory, addresses) is WHALE_RESOURCE_EXHAUSTED. */
WHALE_API whale_status *whale_session_create(whale_engine *engine, const whale_plan *plan,
                                             const whale_session_options *options /* may be NULL */, whale_session **out);
WHALE_API void whale_session_release(whale_session *session); /* stops a running step first */

/* Ports: the inputs and the outputs of steps and evaluations, each numbered from 0. They are looked up once, by name; steps take
 * numbers. Both are the session's and stay as they are as long as it lives; from any thread. */
typedef struct whale_port {
  size_t struct_size;
  whale_str name;
  int32_t dtype;       /* whale_dtype */
  int32_t batch_dim;   /* of an input, the dimension that counts samples; -1: none does, and of outputs */
  const int64_t *dims; /* of a whole batch */
  size_t rank;
  int32_t in_step;     /* 1: whale_session_step has it */
  int32_t in_eval;     /* 1: whale_session_eval has it */
} whale_port;
#define WHALE_PORT_INIT {sizeof(whale_port), {0, 0}, 0, 0, 0, 0, 0, 0}

/* The number of a port. NOT_FOUND, with those that there are: outputs are the graph's and what was named when the plan was made. */
WHALE_API whale_status *whale_session_input(whale_session *session, whale_str name, int32_t *out);
WHALE_API whale_status *whale_session_output(whale_session *session, whale_str name, int32_t *out);
WHALE_API size_t whale_session_input_count(const whale_session *session);
WHALE_API size_t whale_session_output_count(const whale_session *session);
WHALE_API whale_status *whale_session_input_port(whale_session *session, int32_t input, whale_port *out);
WHALE_API whale_status *whale_session_output_port(whale_session *session, int32_t output, whale_port *out);

/* One training step. `inputs`: numbers of ports, every input of a step once; input_tensors: their tensors, which may be released as soon
 * as the call returns only if the event has ended: keep them until then. A batch smaller than the plan's, the same for all inputs, is
 * legal: the denominators are its own. Its entry is the plan's (train_batches) or comes from whale_session_prepare; else it is
 * FAILED_PRECONDITION, or with plan_in_run planned in this call, which `cancel` stops too. UNIMPLEMENTED: samples
 * meet before the loss other than by a sum, mean or maximum, so that the graph speaks of whole batches only. An input that is an index or
 * a label out of range is WHALE_INVALID_ARGUMENT, the step has not run; an index that the graph computes out of range is
 * WHALE_OUT_OF_RANGE of the event, the step did not happen. `outputs`: numbers of ports to fetch; output_tensors are filled when the event
 * ends: NULL tensors are created there, whatever the status of the run, owned by the caller, others are written into (dtype and dims must
 * fit; a value that the plan computes in bf16 is fetched as bf16). The four arrays are read and written in this call only. cancel may be
 * NULL. Only one run is under way at a time: FAILED_PRECONDITION while another is, at once. */
WHALE_API whale_status *whale_session_step(whale_session *session, const int32_t *inputs, whale_tensor *const *input_tensors,
                                           size_t input_count, const int32_t *outputs, whale_tensor **output_tensors, size_t output_count,
                                           whale_cancel *cancel, whale_event **out);
/* The forward pass on the same parameters, without update; dropout off, running statistics used. Targets may be left out when
 * no requested output needs them. */
WHALE_API whale_status *whale_session_eval(whale_session *session, const int32_t *inputs, whale_tensor *const *input_tensors,
                                           size_t input_count, const int32_t *outputs, whale_tensor **output_tensors, size_t output_count,
                                           whale_cancel *cancel, whale_event **out);
/* Plans and binds what runs of `batch` samples need, unless it is there, so that they plan and bind nothing. run: whale_run; a step has at
 * most as many samples as the plan's. Takes as long as planning, which `cancel` (may be NULL) stops; errors are those of whale_plan_create and
 * whale_session_create, and leave the session as it was; FAILED_PRECONDITION while a run, a save or a load is under way. Sizes that need more
 * memory than those before get an area of their own: ask for the largest first. In a world each rank calls it by itself: a run needs the entry on all. */
WHALE_API whale_status *whale_session_prepare(whale_session *session, int32_t run, int64_t batch, whale_cancel *cancel);

/* What this rank's devices read of an input in a run (whale_run) of `batch` samples on all ranks together (0: the graph's own): boxes of the
 * whole batch, in the order of their samples. They are ranges of samples that do not touch, several where replicas cut each micro-batch, and of
 * every other dimension one interval, the same in all boxes, which is less than all where a `split` by height, sequence or alike reads no more.
 * A stage that reads nothing of the input has no box; an input without samples has one. A session without a world reads the whole.
 * An entry of that size is needed, as for whale_session_step; it is planned here where a run would plan it. FAILED_PRECONDITION while a run, a
 * save or a load is under way; INVALID_ARGUMENT: no such input in such a run. */
WHALE_API whale_status *whale_session_slice_count(whale_session *session, int32_t run, int64_t batch, int32_t input, size_t *out);
/* One of them: elements begin[d] to end[d] (not included) of each dimension d. `begin` and `end`: room for as many numbers as the port has dimensions. */
WHALE_API whale_status *whale_session_slice(whale_session *session, int32_t run, int64_t batch, int32_t input, size_t index,
                                            int64_t *begin, int64_t *end);
/* whale_session_step or whale_session_eval (`run`) of `batch` samples on all ranks together (0: the graph's own), where the tensor of each input
 * holds this rank's slices alone: its boxes one behind the other along the dimension that counts samples, the only box of an input without one.
 * An input of which there is no box may be left out. INVALID_ARGUMENT names input and rank, what was expected and what was found, on all ranks.
 * Results are those of whole batches, bit by bit; other ranks may feed whole ones. Outputs, ownership and the rest are as of a step. */
WHALE_API whale_status *whale_session_run_slices(whale_session *session, int32_t run, int64_t batch, const int32_t *inputs,
                                                 whale_tensor *const *input_tensors, size_t input_count, const int32_t *outputs,
                                                 whale_tensor **output_tensors, size_t output_count, whale_cancel *cancel,
                                                 whale_event **out);
/* Instead of the next call that all ranks make (a step, evaluation, read, save or load), where this rank cannot make it: its data cannot be read,
 * or are not what the caller expected. It ends for the other ranks with this code (not WHALE_OK) and message, and this rank; the calls behind it
 * meet as ever. Nothing else changes, and nothing is waited for. Without other ranks it does nothing. Errors of libwhale's own calls have been told
 * already. FAILED_PRECONDITION: a run is under way. */
WHALE_API whale_status *whale_session_refuse(whale_session *session, int32_t code, whale_str message);
/* A number that all ranks have to give alike before their next step or evaluation, such as which batch it is that they read their parts of.
 * Where two ranks give different ones, the run ends on all with WHALE_FAILED_PRECONDITION and the rank, and nothing is changed; 0: none,
 * which goes with everything. It holds for that run alone. FAILED_PRECONDITION: a run, a save or a load is under way. */
WHALE_API whale_status *whale_session_same(whale_session *session, uint64_t number);
/* The entries that the session has, the newest last: the plan's, those that were prepared, and up to 16 that runs planned. */
WHALE_API size_t whale_session_entry_count(const whale_session *session);
WHALE_API whale_status *whale_session_entry(whale_session *session, size_t index, whale_entry *out);

/* Variables by name: parameters, running statistics, and optimizer state as "PARAMETER/STATE". Logical, whole tensors. These calls, and
 * all below that do not start anything, wait for a run that is under way. In a world all ranks read alike, and every one gets the whole; a
 * write is each rank's own: all write the same. */
WHALE_API whale_status *whale_session_read(whale_session *session, whale_str name, whale_tensor **out);
WHALE_API whale_status *whale_session_write(whale_session *session, whale_str name, const whale_tensor *tensor);
/* One of the copies that the devices of the plan hold, assembled to the logical, whole tensor. Copy 0 is what whale_session_read
 * gives, and `copies` of whale_session_variables_json says how many there are: 1 where every element lives on one device. In copy k each
 * element is taken from the k-th device that holds it, in the order of the plan's devices, from the last one where fewer do: all
 * copies together read all that all devices hold. They agree with each other after every step; this is how that is checked.
 * `cancel`, which may be NULL, ends the wait for the other ranks of a world, on all of them.
 * CANCELLED: it did. INVALID_ARGUMENT: no such copy. NOT_FOUND: no such variable. */
WHALE_API whale_status *whale_session_read_copy(whale_session *session, whale_str name, int64_t copy, whale_cancel *cancel,
                                                whale_tensor **out);
/* What of a copy is on this rank's devices, into a tensor of the variable's dtype and dims, at its place; the rest of it is left as it is.
 * bytes: how many were read, those of parts that overlap each time; may be NULL. Waits for no other rank. Without a world all of it is here. */
WHALE_API whale_status *whale_session_read_here(whale_session *session, whale_str name, int64_t copy, whale_tensor *tensor, size_t *bytes);

typedef enum whale_role {
  WHALE_ROLE_PARAMETER = 0,
  WHALE_ROLE_STATE = 1, /* of the optimizer */
  WHALE_ROLE_BUFFER = 2 /* a running statistic */
} whale_role;

typedef struct whale_variable {
  size_t struct_size;
  whale_str name;
  int32_t role;        /* whale_role */
  int32_t dtype;       /* whale_dtype */
  const int64_t *dims; /* logical, whole */
  size_t rank;
  int64_t copies;      /* that the devices hold, see whale_session_read_copy */
} whale_variable;
#define WHALE_VARIABLE_INIT {sizeof(whale_variable), {0, 0}, 0, 0, 0, 0, 0}

/* The variables, numbered from 0 in the order of the plan. From any thread. */
WHALE_API size_t whale_session_variable_count(const whale_session *session);
WHALE_API whale_status *whale_session_variable(whale_session *session, size_t index, whale_variable *out);
/* The devices of the plan, by index, that a copy of a variable is read from. */
WHALE_API whale_status *whale_session_variable_devices(whale_session *session, size_t index, int64_t copy, const int32_t **devices,
                                                       size_t *count);
/* A JSON array of {name, role, dtype, dims, copies}; copies: for each copy the list of devices (indices) that it is read from. */
WHALE_API whale_status *whale_session_variables_json(whale_session *session, whale_text *out);

WHALE_API whale_status *whale_session_set_learning_rate(whale_session *session, double learning_rate); /* fixed from now on; -1: the schedule again */
/* 0 for NULL; -1, which no session has: there is no answer, in a child after fork(). */
WHALE_API double whale_session_learning_rate(const whale_session *session); /* of the next step */
WHALE_API int64_t whale_session_iteration(const whale_session *session);
WHALE_API int64_t whale_session_updates(const whale_session *session);

/* Checkpoints: a directory with model.safetensors (parameters, running statistics), optimizer.safetensors (state) and whale.json,
 * the index, with a CRC-32C of every tensor. The directory is made when it is missing. It may hold other files and be the working
 * directory or a mount point: nothing but these three files is ever replaced, and nothing of anybody else's removed. Whatever fails
 * or dies at whatever moment, the directory holds the previous checkpoint or the new one, whole; after an error it is the previous
 * one, except when the file system fails in the last moment, after the new one is in place. Waits for a run that is under way.
 * ABORTED: another save of this directory is under way, in any thread or process; this one did nothing. FAILED_PRECONDITION, before
 * anything is written: files of these names are there that belong to no checkpoint or to one of a newer format, or the file system
 * has no locks; or the devices are null devices, which hold no values (reading gives zeros, as fetching does). RESOURCE_EXHAUSTED, PERMISSION_DENIED, UNAVAILABLE: the system's refusal, with the path.
 * In a world all ranks save alike, into one directory that all of them see: each writes two files of its own
 * (model-00001-of-00003.safetensors, optimizer-...), and rank 0 the index once all are written. A rank that fails, cancels, is lost or
 * does not answer ends the save on all, with a status whose rank it is, and the previous checkpoint stays. */
WHALE_API whale_status *whale_session_save(whale_session *session, whale_str directory);
/* The same on a thread of the library. Until the event has ended the session starts nothing else (FAILED_PRECONDITION); other calls wait for
 * it, and so does whale_session_release. Cancelling (cancel may be NULL) leaves the previous checkpoint; once the new one is in place it
 * is too late, and the save has succeeded. */
WHALE_API whale_status *whale_session_save_async(whale_session *session, whale_str directory, whale_cancel *cancel, whale_event **out);
/* Whether a save to this directory would begin now, for asking before the training whose end it is: the errors of whale_session_save
 * that its directory gives, found by making and removing a trial file in it (a trial folder beside it, when it is missing). Nothing is left
 * behind. Not whether there is room. From any thread. */
WHALE_API whale_status *whale_checkpoint_check_target(whale_str directory);
/* Restores variables, counters and seed, into any plan of the same model. Every byte is checked before a variable is changed: after an
 * error the session is as it was, unless the files were changed or the disk failed between the check and the reading, which breaks the
 * session (damage SESSION) until a load succeeds. A load beside a save, also one of another process, sees one checkpoint or the other. NOT_FOUND: there is none. DATA_LOSS: damaged; the
 * message names file and tensor. INVALID_ARGUMENT: of another model, or with the state of another optimizer (older checkpoints do not
 * name theirs: there the names of its state must be those of this one's). FAILED_PRECONDITION: of a newer format. Checkpoints of format 1
 * have no checksums: they load, and whale_session_report_json says so. A plan whose optimizer keeps no state, or that is not trained, leaves
 * the optimizer state out; whale_session_report_json names it (`left_out`). Halves of split weights are no state of an optimizer: they are
 * joined for a plan that has whole weights, and cut for one that has halves, to the bit. A checkpoint of any number of ranks loads into a
 * session of any. In a world all ranks load alike, and each reads what its devices need; an error of one is one of all, with its rank,
 * and leaves every session as it was. */
WHALE_API whale_status *whale_session_load(whale_session *session, whale_str directory);
/* The same on a thread of the library, as whale_session_save_async. Cancelling while the files are checked leaves the session as it was; once
 * variables are written it is too late. */
WHALE_API whale_status *whale_session_load_async(whale_session *session, whale_str directory, whale_cancel *cancel, whale_event **out);
/* What a checkpoint holds, after reading and checking every byte of it; errors as of whale_session_load. As
 * JSON: format, library, id, checksums (false: format 1, which has none), model, seed, iteration, updates, learning_rate, optimizer (that
 * made the state, such as "adamw"; null: an older one, which does not say), ranks (that wrote it), tensors [{name, file, dtype, dims, bytes; of
 * several ranks also parts [{file, at}], file being the first of them}]. From any thread. */
WHALE_API whale_status *whale_checkpoint_inspect(whale_str directory, whale_text *out);
WHALE_API whale_status *whale_checkpoint_inspect_json(whale_str directory, whale_text *out);

/* Timeline of the last run as Chrome trace JSON (ui.perfetto.dev), when tracing was on. */
WHALE_API whale_status *whale_session_trace(whale_session *session, int32_t enable);
WHALE_API whale_status *whale_session_timeline_json(whale_session *session, whale_text *out);
/* Bytes that the session has taken on one device of the plan; gradients and inputs are those of the last run. */
WHALE_API whale_status *whale_session_memory(whale_session *session, size_t device, whale_memory *out);
/* The flight record of this rank: what each queue of its devices is at, what it waits for, and its last instructions with their times, as
 * JSON that `whale inspect` shows. It is always on. From any thread, also while a run is under way that does not end; nothing is waited for.
 * When a run ends with an error and WHALE_FLIGHT_RECORDER in the environment names a folder, it is written to rank-N.json there. */
WHALE_API whale_status *whale_session_flight_record_json(whale_session *session, whale_text *out);
/* JSON: bytes by class for each device (parameters, gradients, state, activations, buffers, workspace), seconds of the last step in
 * ops, collectives, waiting; `loaded` {directory, id, format, checksums, seed, left_out: names of optimizer
 * state that the plan has no place for, optimizer: that made its state, or null} once a checkpoint was loaded; `message_bytes` that are
 * kept for messages of other ranks, where there are any. */
WHALE_API whale_status *whale_session_report_json(whale_session *session, whale_text *out);

/* Names of earlier versions, and what they are called now. */
#define whale_engine_ops whale_engine_ops_is_now_whale_engine_ops_json
#define whale_session_variables whale_session_variables_is_now_whale_session_variables_json
#define whale_session_report whale_session_report_is_now_whale_session_report_json
#define whale_session_timeline whale_session_timeline_is_now_whale_session_timeline_json
#define whale_named_tensor whale_named_tensor_is_now_whale_session_input
#define whale_schedule_kind whale_schedule_kind_is_now_whale_lr_schedule
#define whale_plan_bridges whale_plan_bridges_is_now_whale_plan_reshards

#ifdef __cplusplus
}
#endif
#endif
