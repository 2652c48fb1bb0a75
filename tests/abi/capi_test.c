/* The C ABI from a C program: a small MLP on two reference devices, and everything that can be done wrong. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <whale/whale.h>
#include <whale/dlpack.h>

static int failures;
#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                                   \
    }                                                                               \
  } while (0)

/* The call must succeed; without that the rest makes no sense. */
#define OK(call) ok((call), __FILE__, __LINE__)
static void ok(whale_status* status, const char* file, int line) {
  if (status == NULL) return;
  whale_str m = whale_status_message(status);
  fprintf(stderr, "%s:%d: %.*s\n", file, line, (int)m.size, m.data);
  exit(1);
}

/* The call must fail with this code and a message that contains `part`. */
#define FAILS(call, code, part) fails((call), (code), (part), __FILE__, __LINE__)
static void fails(whale_status* status, int code, const char* part, const char* file, int line) {
  if (status == NULL) {
    fprintf(stderr, "%s:%d: succeeded, expected an error about '%s'\n", file, line, part);
    ++failures;
    return;
  }
  whale_str m = whale_status_message(status);
  char* text = calloc(m.size + 1, 1);
  memcpy(text, m.data, m.size);
  if (whale_status_code(status) != code || strstr(text, part) == NULL) {
    fprintf(stderr, "%s:%d: code %d, message '%s'; expected code %d and '%s'\n", file, line, whale_status_code(status),
            text, code, part);
    ++failures;
  }
  free(text);
  whale_status_release(status);
}

static int same(whale_str s, const char* text) { return s.size == strlen(text) && memcmp(s.data, text, s.size) == 0; }
static int contains(whale_text t, const char* part) { return t.data != NULL && strstr(t.data, part) != NULL; }
static whale_str str(const char* text) {
  whale_str s = {text, strlen(text)};
  return s;
}

enum { BATCH = 8, IN = 5, HIDDEN = 7, OUT = 3 };
static whale_engine* engine;

static whale_value op(whale_graph* g, const char* name, const whale_value* in, size_t n) {
  whale_value out[3] = {-7, -7, -7};
  size_t count = 0;
  OK(whale_graph_op(g, str(name), in, n, NULL, 0, NULL, out, 3, &count));
  return out[0];
}

static whale_graph* mlp(void) {
  const int64_t x_dims[] = {BATCH, IN}, y_dims[] = {BATCH}, w1_dims[] = {IN, HIDDEN}, b1_dims[] = {HIDDEN},
                w2_dims[] = {HIDDEN, OUT};
  whale_graph* g;
  OK(whale_graph_create(engine, WHALE_STR("mlp"), &g));
  whale_value x, y, w1, b1, w2, in[3];
  OK(whale_graph_input(g, WHALE_STR("x"), WHALE_F32, x_dims, 2, 0, &x));
  OK(whale_graph_input(g, WHALE_STR("y"), WHALE_I32, y_dims, 1, 0, &y));
  whale_scope_options scope = WHALE_SCOPE_OPTIONS_INIT;
  scope.kind = WHALE_SCOPE_REPLICA;
  OK(whale_graph_scope_begin(g, &scope));
  scope.kind = WHALE_SCOPE_NAME;
  scope.name = WHALE_STR("body");
  OK(whale_graph_scope_begin(g, &scope));
  whale_parameter_options normal = WHALE_PARAMETER_OPTIONS_INIT;
  normal.init = WHALE_INIT_NORMAL;
  normal.b = 0.5;
  OK(whale_graph_parameter(g, WHALE_STR("w1"), WHALE_F32, w1_dims, 2, &normal, &w1));
  OK(whale_graph_parameter(g, WHALE_STR("b1"), WHALE_F32, b1_dims, 1, NULL, &b1));
  OK(whale_graph_parameter(g, WHALE_STR("w2"), WHALE_F32, w2_dims, 2, &normal, &w2));
  in[0] = x, in[1] = w1, in[2] = b1;
  whale_value h = op(g, "matmul", in, 3);
  h = op(g, "relu", &h, 1);
  in[0] = h, in[1] = w2;
  h = op(g, "matmul", in, 2);
  OK(whale_graph_output(g, WHALE_STR("logits"), h));
  in[0] = h, in[1] = y;
  h = op(g, "cross_entropy", in, 2);
  h = op(g, "reduce_mean", &h, 1);
  OK(whale_graph_scope_end(g));
  OK(whale_graph_scope_end(g));
  whale_training_options t = WHALE_TRAINING_OPTIONS_INIT;
  t.learning_rate = 0.5;
  whale_training_options odd = t; /* options that would do nothing */
  odd.optimizer = WHALE_OPTIMIZER_SGD, odd.momentum = 0, odd.nesterov = 1;
  FAILS(whale_graph_minimize(g, h, &odd), WHALE_INVALID_ARGUMENT, "nesterov");
  odd.nesterov = 0, odd.lr_schedule = WHALE_LR_CONSTANT, odd.total_steps = 10;
  FAILS(whale_graph_minimize(g, h, &odd), WHALE_INVALID_ARGUMENT, "total_steps is 10");
  odd.optimizer = WHALE_OPTIMIZER_ADAM, odd.total_steps = 0, odd.momentum = 0.5;
  FAILS(whale_graph_minimize(g, h, &odd), WHALE_INVALID_ARGUMENT, "only sgd has");
  OK(whale_graph_minimize(g, h, &t));
  OK(whale_graph_seal(g));
  OK(whale_graph_seal(g));
  return g;
}

/* ---- the engine, texts, statuses
 * ---------------------------------------------------------------------------------------- */
static void test_engine(void) {
  CHECK(strcmp(whale_version(), "0.2.0") == 0);
  whale_text text = {NULL, 0};
  OK(whale_engine_ops_json(engine, &text));
  CHECK(contains(text, "\"name\":\"matmul\"") && contains(text, "\"attributes\":["));
  CHECK(text.size == strlen(text.data));
  whale_text_release(&text);
  CHECK(text.data == NULL && text.size == 0);
  whale_text_release(&text);
  whale_text_release(NULL);
  OK(whale_engine_devices(engine, &text));
  CHECK(contains(text, "ref"));
  whale_text_release(&text);
  OK(whale_engine_devices_json(engine, &text));
  CHECK(contains(text, "\"name\":\"ref\",\"available\":true"));
  whale_text_release(&text);
  FAILS(whale_engine_ops_json(engine, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_engine_ops_json(NULL, &text), WHALE_INVALID_ARGUMENT, "`engine` is NULL");
  CHECK(text.data == NULL);

  whale_engine_options o = WHALE_ENGINE_OPTIONS_INIT;
  whale_engine* other = NULL;
  o.struct_size = 0;
  FAILS(whale_engine_create(&o, &other), WHALE_INVALID_ARGUMENT, "struct_size is 0");
  CHECK(other == NULL);
  struct {
    whale_engine_options o;
    int64_t newer;
  } longer = {WHALE_ENGINE_OPTIONS_INIT, 0};
  longer.o.struct_size = sizeof longer;
  OK(whale_engine_create(&longer.o, &other));
  whale_engine_release(other);
  other = NULL;
  longer.newer = 1;
  FAILS(whale_engine_create(&longer.o, &other), WHALE_UNIMPLEMENTED, "does not know");
  CHECK(other == NULL);

  CHECK(whale_status_code(NULL) == WHALE_OK && whale_status_damage(NULL) == WHALE_DAMAGE_CALL &&
        whale_status_rank(NULL) == -1);
  CHECK(whale_status_message(NULL).size == 0);
  whale_status_release(NULL);
  whale_engine_release(NULL);
}

static void test_version(void) {
  CHECK(whale_version_number() == WHALE_VERSION_NUMBER);
  OK(whale_abi_check(WHALE_VERSION_NUMBER));
  FAILS(whale_abi_check(1000), WHALE_FAILED_PRECONDITION, "compiled with whale.h 0.1.0, and this library is 0.2.0");
  FAILS(whale_abi_check(WHALE_VERSION_NUMBER + 1), WHALE_FAILED_PRECONDITION, "install the newer library");
  FAILS(whale_abi_check(1002000), WHALE_FAILED_PRECONDITION, "whale.h 1.2.0");
  FAILS(whale_abi_check(-1), WHALE_INVALID_ARGUMENT, "header_version");
}

/* ---- zero is the default
 * ------------------------------------------------------------------------------------------------------- */
static int is_zeroed(const void* options, size_t size) { /* but for its struct_size */
  const unsigned char* bytes = options;
  for (size_t i = sizeof(size_t); i < size; ++i)
    if (bytes[i] != 0) return 0;
  return *(const size_t*)options == size;
}

/* A graph of one parameter, minimized with these options, as JSON. */
static whale_text minimized(const whale_training_options* options, const whale_parameter_options* parameter) {
  const int64_t dims[] = {4, 3};
  whale_graph* g;
  whale_value w, loss;
  whale_text text = {NULL, 0};
  OK(whale_graph_create(engine, WHALE_STR("defaults"), &g));
  OK(whale_graph_parameter(g, WHALE_STR("w"), WHALE_F32, dims, 2, parameter, &w));
  loss = op(g, "reduce_sum", &w, 1);
  OK(whale_graph_minimize(g, loss, options));
  OK(whale_graph_json(g, &text));
  whale_graph_release(g);
  return text;
}

static void test_defaults(void) {
  /* static: what lies between fields is zero too */
  static const whale_engine_options engine_options = WHALE_ENGINE_OPTIONS_INIT;
  static const whale_parameter_options parameter_options = WHALE_PARAMETER_OPTIONS_INIT;
  static const whale_op_options op_options = WHALE_OP_OPTIONS_INIT;
  static const whale_scope_options scope_options = WHALE_SCOPE_OPTIONS_INIT;
  static const whale_training_options training_options = WHALE_TRAINING_OPTIONS_INIT;
  static const whale_plan_options plan_options = WHALE_PLAN_OPTIONS_INIT;
  static const whale_session_options session_options = WHALE_SESSION_OPTIONS_INIT;
  CHECK(is_zeroed(&engine_options, sizeof engine_options));
  CHECK(is_zeroed(&parameter_options, sizeof parameter_options));
  static const whale_group_options group_options = WHALE_GROUP_OPTIONS_INIT;
  CHECK(is_zeroed(&group_options, sizeof group_options));
  CHECK(is_zeroed(&op_options, sizeof op_options));
  CHECK(is_zeroed(&scope_options, sizeof scope_options));
  CHECK(is_zeroed(&training_options, sizeof training_options));
  CHECK(is_zeroed(&plan_options, sizeof plan_options));
  CHECK(is_zeroed(&session_options, sizeof session_options));

  whale_text by_null = minimized(NULL, NULL), by_zeros = minimized(&training_options, &parameter_options);
  CHECK(strcmp(by_null.data, by_zeros.data) == 0);
  CHECK(contains(by_null, "\"optimizer\":\"sgd\",\"learning_rate\":0.001,\"accumulation\":1,"));
  CHECK(contains(by_null, "\"precision\":\"f32\"") && contains(by_null, "\"lr_schedule\":\"constant\""));
  CHECK(contains(by_null, "\"decay\":true"));
  whale_text_release(&by_null);
  whale_text_release(&by_zeros);

  whale_training_options t = WHALE_TRAINING_OPTIONS_INIT;
  const struct {
    int32_t optimizer;
    const char* epsilon;
  } rows[] = {{WHALE_OPTIMIZER_ADAM, "1e-08"},
              {WHALE_OPTIMIZER_ADAMW, "1e-08"},
              {WHALE_OPTIMIZER_LAMB, "1e-06"},
              {WHALE_OPTIMIZER_ADAGRAD, "1e-10"},
              {WHALE_OPTIMIZER_ADAFACTOR, "1e-30"}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
    char words[80];
    t.optimizer = rows[i].optimizer;
    snprintf(words, sizeof words, "\"beta1\":0.9,\"beta2\":0.999,\"epsilon\":%s,", rows[i].epsilon);
    whale_text text = minimized(&t, NULL);
    CHECK(contains(text, words) && contains(text, "\"decay_rate\":-0.8,\"clip_threshold\":1.0"));
    whale_text_release(&text);
  }
  /* Where 0 is meant. */
  t.optimizer = WHALE_OPTIMIZER_ADAM;
  t.zeros = WHALE_ZERO_LEARNING_RATE | WHALE_ZERO_BETA1 | WHALE_ZERO_EPSILON;
  whale_text text = minimized(&t, NULL);
  CHECK(contains(text, "\"learning_rate\":0.0,") && contains(text, "\"beta1\":0.0,\"beta2\":0.999,\"epsilon\":0.0,"));
  whale_text_release(&text);
  whale_parameter_options p = WHALE_PARAMETER_OPTIONS_INIT;
  p.decay = WHALE_DECAY_NEVER;
  text = minimized(NULL, &p);
  CHECK(contains(text, "\"decay\":false"));
  whale_text_release(&text);

  const int64_t dims[] = {4, 3};
  whale_graph* g;
  whale_value w, loss;
  OK(whale_graph_create(engine, WHALE_STR("zeros"), &g));
  OK(whale_graph_parameter(g, WHALE_STR("w"), WHALE_F32, dims, 2, NULL, &w));
  loss = op(g, "reduce_sum", &w, 1);
  t.beta1 = 0.5;
  FAILS(whale_graph_minimize(g, loss, &t), WHALE_INVALID_ARGUMENT, "options.beta1 is meant to be 0, and it is 0.5");
  t.beta1 = 0, t.zeros = 64;
  FAILS(whale_graph_minimize(g, loss, &t), WHALE_INVALID_ARGUMENT, "options.zeros");
  t.zeros = 0, t.precision = WHALE_PRECISION_F16 + 1;
  FAILS(whale_graph_minimize(g, loss, &t), WHALE_INVALID_ARGUMENT, "options.precision");
  /* A struct of an older header, which ended before `accumulation`. */
  t.precision = 0, t.accumulation = 7;
  t.struct_size = offsetof(whale_training_options, accumulation);
  OK(whale_graph_minimize(g, loss, &t));
  OK(whale_graph_json(g, &text));
  CHECK(contains(text, "\"accumulation\":1,"));
  whale_text_release(&text);
  whale_graph_release(g);
}

/* ---- tensors
 * -------------------------------------------------------------------------------------------------------------- */
static int deleted;
static void legacy_deleter(DLManagedTensor* self) {
  (void)self;
  ++deleted;
}

static void test_tensors(void) {
  const int64_t dims[] = {2, 3};
  whale_tensor* t = NULL;
  OK(whale_tensor_create(WHALE_F32, dims, 2, &t));
  CHECK(whale_tensor_dtype(t) == WHALE_F32 && whale_tensor_rank(t) == 2 && whale_tensor_bytes(t) == 24);
  CHECK(whale_tensor_dims(t)[1] == 3 && ((float*)whale_tensor_data(t))[5] == 0.0f);
  ((float*)whale_tensor_data(t))[5] = 42.0f;
  DLManagedTensorVersioned* dl = NULL;
  OK(whale_tensor_to_dlpack(t, &dl));
  whale_tensor_release(t);
  CHECK(((float*)dl->dl_tensor.data)[5] == 42.0f && dl->dl_tensor.shape[0] == 2 && dl->version.major == 1);
  whale_tensor* back = NULL;
  OK(whale_tensor_from_dlpack(dl, &back));
  CHECK(((float*)whale_tensor_data(back))[5] == 42.0f);
  whale_tensor_release(back);

  float data[6] = {0};
  int64_t shape[] = {2, 3}, strides[] = {1, 2};
  DLManagedTensor legacy;
  memset(&legacy, 0, sizeof legacy);
  legacy.dl_tensor.data = data;
  legacy.dl_tensor.device.device_type = 1;
  legacy.dl_tensor.ndim = 2;
  legacy.dl_tensor.dtype.code = 2;
  legacy.dl_tensor.dtype.bits = 32;
  legacy.dl_tensor.dtype.lanes = 1;
  legacy.dl_tensor.shape = shape;
  legacy.dl_tensor.strides = strides;
  legacy.deleter = legacy_deleter;
  t = NULL;
  FAILS(whale_tensor_from_dlpack_legacy(&legacy, &t), WHALE_INVALID_ARGUMENT, "contiguous");
  legacy.dl_tensor.strides = NULL;
  legacy.dl_tensor.device.device_type = 2;
  FAILS(whale_tensor_from_dlpack_legacy(&legacy, &t), WHALE_INVALID_ARGUMENT, "host memory");
  legacy.dl_tensor.device.device_type = 1;
  legacy.dl_tensor.dtype.bits = 12;
  FAILS(whale_tensor_from_dlpack_legacy(&legacy, &t), WHALE_INVALID_ARGUMENT, "12 bits");
  CHECK(t == NULL && deleted == 0);
  legacy.dl_tensor.dtype.bits = 32;
  OK(whale_tensor_from_dlpack_legacy(&legacy, &t));
  CHECK(whale_tensor_placement(t) == WHALE_PLACEMENT_HOST && whale_tensor_placement(NULL) == WHALE_PLACEMENT_HOST);
  whale_tensor_release(t);
  CHECK(deleted == 1);
  for (int type = 3; type <= 11; type += 8) { /* pinned by CUDA, by ROCm: the host reads it, and it stays what it is */
    legacy.dl_tensor.device.device_type = type;
    OK(whale_tensor_from_dlpack_legacy(&legacy, &t));
    CHECK(whale_tensor_placement(t) == WHALE_PLACEMENT_PINNED && whale_tensor_data(t) == data);
    OK(whale_tensor_to_dlpack(t, &dl));
    CHECK(dl->dl_tensor.device.device_type == type);
    dl->deleter(dl);
    whale_tensor_release(t);
  }
  CHECK(deleted == 3);
  legacy.dl_tensor.device.device_type = 1;

  t = NULL;
  const int64_t negative[] = {-1}, huge[] = {INT64_MAX / 2, INT64_MAX / 2}, large[] = {(int64_t)1 << 45};
  FAILS(whale_tensor_create(99, dims, 2, &t), WHALE_INVALID_ARGUMENT, "dtype 99");
  FAILS(whale_tensor_create(WHALE_F32, NULL, 2, &t), WHALE_INVALID_ARGUMENT, "`dims` is NULL");
  FAILS(whale_tensor_create(WHALE_F32, negative, 1, &t), WHALE_INVALID_ARGUMENT, "negative");
  FAILS(whale_tensor_create(WHALE_F32, huge, 2, &t), WHALE_INVALID_ARGUMENT, "larger");
  FAILS(whale_tensor_create(WHALE_F32, large, 1, &t), WHALE_INVALID_ARGUMENT, "larger");
  FAILS(whale_tensor_create(WHALE_F32, dims, 1000, &t), WHALE_INVALID_ARGUMENT, "1000 dimensions");
  FAILS(whale_tensor_view(WHALE_F32, dims, 2, NULL, &t), WHALE_INVALID_ARGUMENT, "`data` is NULL");
  FAILS(whale_tensor_view(WHALE_F32, dims, 2, (char*)data + 1, &t), WHALE_INVALID_ARGUMENT, "aligned");
  CHECK(t == NULL);
  OK(whale_tensor_create(WHALE_I64, NULL, 0, &t)); /* a scalar */
  CHECK(whale_tensor_bytes(t) == 8);
  whale_tensor_release(t);
  whale_tensor_release(NULL);
}

/* ---- graphs
 * ----------------------------------------------------------------------------------------------------------------- */
static void test_graph(void) {
  whale_graph* g = mlp();
  whale_text text = {NULL, 0};
  whale_bytes bytes = {NULL, 0}, more = {NULL, 0};
  OK(whale_graph_print(g, WHALE_STR("graph"), &text));
  CHECK(contains(text, "matmul"));
  whale_text_release(&text);
  OK(whale_graph_print(g, WHALE_STR("train"), &text));
  CHECK(contains(text, "sgd"));
  whale_text_release(&text);
  FAILS(whale_graph_print(g, WHALE_STR("nonsense"), &text), WHALE_INVALID_ARGUMENT, "level 'nonsense'");
  OK(whale_graph_summary(g, &text));
  CHECK(contains(text, "body") && contains(text, "parameters"));
  for (const char* line = text.data; *line != '\0';) {
    const size_t n = strcspn(line, "\n");
    CHECK(n <= 100);
    line += n + (line[n] != '\0');
  }
  whale_text_release(&text);
  OK(whale_graph_json(g, &text));
  CHECK(contains(text, "\"name\":\"body.w1\"") && contains(text, "\"kind\":\"replica\""));
  whale_text_release(&text);
  OK(whale_graph_serialize(g, &bytes));

  whale_graph* again = NULL;
  OK(whale_graph_parse(engine, bytes.data, bytes.size, &again));
  OK(whale_graph_serialize(again, &more));
  CHECK(more.size == bytes.size && memcmp(more.data, bytes.data, more.size) == 0);
  whale_bytes_release(&more);
  CHECK(more.data == NULL && more.size == 0);
  whale_bytes_release(NULL);
  whale_graph_release(again);
  again = NULL;
  FAILS(whale_graph_parse(engine, bytes.data, bytes.size / 2, &again), WHALE_DATA_LOSS, "the graph is damaged");
  FAILS(whale_graph_parse(engine, "rubbish!", 8, &again), WHALE_INVALID_ARGUMENT, "first bytes");
  FAILS(whale_graph_parse(engine, NULL, 8, &again), WHALE_INVALID_ARGUMENT, "`data` is NULL");
  whale_plan* plan = NULL;
  FAILS(whale_plan_parse(engine, bytes.data, bytes.size, &plan), WHALE_INVALID_ARGUMENT, "this is a graph");
  CHECK(again == NULL && plan == NULL);
  whale_bytes_release(&bytes);

  char path[] = "capi_test_XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0);
  close(fd);
  OK(whale_graph_save(g, str(path)));
  OK(whale_graph_load(engine, str(path), &again));
  whale_graph_release(again);
  unlink(path);
  again = NULL;
  FAILS(whale_graph_load(engine, str(path), &again), WHALE_NOT_FOUND, path);
  FAILS(whale_graph_load(engine, WHALE_STR("."), &again), WHALE_INVALID_ARGUMENT, "regular file");
  FAILS(whale_graph_load(engine, WHALE_STR(""), &again), WHALE_INVALID_ARGUMENT, "`path` is empty");
  FAILS(whale_graph_save(g, WHALE_STR("/nonexistent/folder/file")), WHALE_NOT_FOUND, "/nonexistent/folder/file");
  CHECK(again == NULL);

  whale_value v = -7;
  FAILS(whale_graph_input(g, WHALE_STR("z"), WHALE_F32, NULL, 0, -1, &v), WHALE_FAILED_PRECONDITION, "sealed");
  CHECK(v == -7);
  whale_graph_release(g);
  whale_graph_release(NULL);
}

static void test_graph_errors(void) {
  const int64_t a_dims[] = {4, 3}, b_dims[] = {5, 6};
  whale_graph* g;
  OK(whale_graph_create(engine, WHALE_STR("bad"), &g));
  whale_value a, b, in[2], out[2] = {-7, -7};
  OK(whale_graph_input(g, WHALE_STR("a"), WHALE_F32, a_dims, 2, 0, &a));
  OK(whale_graph_parameter(g, WHALE_STR("b"), WHALE_F32, b_dims, 2, NULL, &b));
  whale_value v = -7;
  size_t n = 77;
  FAILS(whale_graph_input(g, WHALE_STR("a"), WHALE_F32, a_dims, 2, 0, &v), WHALE_ALREADY_EXISTS, "input 'a'");
  FAILS(whale_graph_input(g, WHALE_STR(""), WHALE_F32, a_dims, 2, 0, &v), WHALE_INVALID_ARGUMENT, "empty");
  FAILS(whale_graph_input(g, WHALE_STR("c"), WHALE_F32, a_dims, 2, 2, &v), WHALE_INVALID_ARGUMENT, "batch dimension 2");
  FAILS(whale_graph_input(g, WHALE_STR("a\nb"), WHALE_F32, a_dims, 2, 0, &v), WHALE_INVALID_ARGUMENT, "`name`");
  FAILS(whale_graph_input(g, WHALE_STR("\xff"), WHALE_F32, a_dims, 2, 0, &v), WHALE_INVALID_ARGUMENT, "UTF-8");
  whale_str null = {NULL, 3};
  FAILS(whale_graph_input(g, null, WHALE_F32, a_dims, 2, 0, &v), WHALE_INVALID_ARGUMENT, "NULL");
  FAILS(whale_graph_parameter(g, WHALE_STR("i"), WHALE_I32, a_dims, 2, NULL, &v), WHALE_INVALID_ARGUMENT,
        "floating point");
  whale_parameter_options p = WHALE_PARAMETER_OPTIONS_INIT;
  p.init = 17;
  FAILS(whale_graph_parameter(g, WHALE_STR("p"), WHALE_F32, a_dims, 2, &p, &v), WHALE_INVALID_ARGUMENT, "options.init");
  p.init = WHALE_INIT_ZEROS, p.decay = 3;
  FAILS(whale_graph_parameter(g, WHALE_STR("p"), WHALE_F32, a_dims, 2, &p, &v), WHALE_INVALID_ARGUMENT,
        "options.decay");
  p.decay = WHALE_DECAY_BY_RANK;
  p.init = WHALE_INIT_NORMAL;
  p.b = NAN;
  FAILS(whale_graph_parameter(g, WHALE_STR("p"), WHALE_F32, a_dims, 2, &p, &v), WHALE_INVALID_ARGUMENT, "finite");
  CHECK(v == -7);

  whale_scope_options scope = WHALE_SCOPE_OPTIONS_INIT;
  FAILS(whale_graph_scope_begin(g, NULL), WHALE_INVALID_ARGUMENT, "`options` is NULL");
  FAILS(whale_graph_scope_begin(g, &scope), WHALE_INVALID_ARGUMENT, "options.kind");
  scope.kind = WHALE_SCOPE_REPLICA;
  scope.by = WHALE_STR("moon");
  FAILS(whale_graph_scope_begin(g, &scope), WHALE_INVALID_ARGUMENT, "moon");
  FAILS(whale_graph_scope_end(g), WHALE_FAILED_PRECONDITION, "no scope");
  scope.by = WHALE_STR("");
  /* Options of other kinds. */
  const double halves[] = {1, 1};
  for (int k = WHALE_SCOPE_REPLICA; k <= WHALE_SCOPE_NAME; ++k) {
    const whale_scope_options none = {sizeof none, k, WHALE_STR("s"), 0, 0,      0,     {0, 0},
                                      {0, 0},      0, {0, 0},         0, {0, 0}, {0, 0}};
    struct {
      const char* name;
      unsigned kinds; /* that have it */
      whale_scope_options options;
    } of[9] = {{"count", 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4, none},
               {"shares", 1 << 1 | 1 << 2, none},
               {"by", 1 << 1, none},
               {"factor", 1 << 2, none},
               {"micro_batches", 1 << 4, none},
               {"schedule", 1 << 4, none},
               {"virtual_stages", 1 << 4, none},
               {"device_order", 1 << 1 | 1 << 5, none},
               {"devices", 1 << 5, none}};
    of[0].options.count = 2;
    of[1].options.shares = halves, of[1].options.share_count = 2;
    of[2].options.by = WHALE_STR("sample");
    of[3].options.factor = WHALE_STR("heads");
    of[4].options.micro_batches = 7;
    of[5].options.schedule = WHALE_STR("zb_v");
    of[6].options.virtual_stages = 3;
    of[7].options.device_order = WHALE_STR("major");
    of[8].options.devices = WHALE_STR("cpu:2");
    for (int i = 0; i < 9; ++i) {
      char words[64];
      snprintf(words, sizeof words, "options.%s is given for a ", of[i].name);
      if (of[i].kinds >> k & 1) {
        OK(whale_graph_scope_begin(g, &of[i].options));
        OK(whale_graph_scope_end(g));
      } else {
        FAILS(whale_graph_scope_begin(g, &of[i].options), WHALE_INVALID_ARGUMENT, words);
      }
    }
  }
  scope.factor = WHALE_STR("heads");
  FAILS(whale_graph_scope_begin(g, &scope), WHALE_INVALID_ARGUMENT,
        "options.factor is given for a replica scope; it is an option of split");
  scope.factor = WHALE_STR("");
  scope.name = WHALE_STR("twice");
  OK(whale_graph_scope_begin(g, &scope));
  scope.kind = WHALE_SCOPE_NAME;
  scope.name = WHALE_STR("layer");
  OK(whale_graph_scope_begin(g, &scope));

  /* An op that does not fit: where it is, and what it is. */
  in[0] = a, in[1] = b;
  whale_op_options o = WHALE_OP_OPTIONS_INIT;
  o.name = WHALE_STR("project");
  o.location = WHALE_STR("model.py:12");
  whale_status* s = whale_graph_op(g, WHALE_STR("matmul"), in, 2, NULL, 0, &o, out, 2, &n);
  CHECK(s != NULL && whale_status_code(s) == WHALE_INVALID_ARGUMENT && whale_status_damage(s) == WHALE_DAMAGE_CALL);
  CHECK(same(whale_status_op(s), "layer.project"));
  CHECK(same(whale_status_scope(s), "twice/layer"));
  CHECK(whale_status_rank(s) == -1 && whale_status_device(s) == -1);
  whale_str m = whale_status_message(s);
  CHECK(m.size > 13 && memcmp(m.data, "model.py:12: ", 13) == 0);
  whale_status_release(s);

  FAILS(whale_graph_op(g, WHALE_STR("matmull"), in, 2, NULL, 0, NULL, out, 2, &n), WHALE_NOT_FOUND,
        "did you mean 'matmul'");
  FAILS(whale_graph_op(g, WHALE_STR("all_reduce"), in, 1, NULL, 0, NULL, out, 2, &n), WHALE_INVALID_ARGUMENT,
        "planner");
  FAILS(whale_graph_op(g, WHALE_STR("relu"), in, 2, NULL, 0, NULL, out, 2, &n), WHALE_INVALID_ARGUMENT, "2 operands");
  FAILS(whale_graph_op(g, WHALE_STR("relu"), NULL, 1, NULL, 0, NULL, out, 2, &n), WHALE_INVALID_ARGUMENT,
        "`inputs` is NULL");
  FAILS(whale_graph_op(g, WHALE_STR("relu"), in, 1, NULL, 0, NULL, out, 0, &n), WHALE_INVALID_ARGUMENT, "room for 0");
  FAILS(whale_graph_op(g, WHALE_STR("relu"), in, 1, NULL, 0, NULL, NULL, 2, &n), WHALE_INVALID_ARGUMENT,
        "`outputs` is NULL");
  FAILS(whale_graph_op(g, WHALE_STR("relu"), in, 1, NULL, 0, NULL, out, 2, NULL), WHALE_INVALID_ARGUMENT,
        "`output_count` is NULL");
  in[0] = 1234;
  FAILS(whale_graph_op(g, WHALE_STR("relu"), in, 1, NULL, 0, NULL, out, 2, &n), WHALE_INVALID_ARGUMENT, "value 1234");
  in[0] = a;
  whale_attr attr;
  memset(&attr, 0, sizeof attr);
  attr.name = WHALE_STR("axes");
  attr.kind = WHALE_ATTR_STRING;
  attr.s = WHALE_STR("no");
  FAILS(whale_graph_op(g, WHALE_STR("reduce_sum"), in, 1, &attr, 1, NULL, out, 2, &n), WHALE_INVALID_ARGUMENT, "axes");
  attr.name = WHALE_STR("bananas");
  FAILS(whale_graph_op(g, WHALE_STR("reduce_sum"), in, 1, &attr, 1, NULL, out, 2, &n), WHALE_INVALID_ARGUMENT,
        "bananas");
  attr.kind = 9;
  FAILS(whale_graph_op(g, WHALE_STR("reduce_sum"), in, 1, &attr, 1, NULL, out, 2, &n), WHALE_INVALID_ARGUMENT,
        "kind 9");
  CHECK(out[0] == -7 && out[1] == -7 && n == 77);

  FAILS(whale_graph_seal(g), WHALE_FAILED_PRECONDITION, "still open");
  OK(whale_graph_op(g, WHALE_STR("relu"), in, 1, NULL, 0, NULL, out, 2, &n));
  CHECK(n == 1);
  FAILS(whale_graph_minimize(g, out[0], NULL), WHALE_INVALID_ARGUMENT, "scalar");
  FAILS(whale_graph_minimize(g, 99, NULL), WHALE_INVALID_ARGUMENT, "value 99");
  FAILS(whale_graph_output(g, WHALE_STR("loss"), out[0]), WHALE_INVALID_ARGUMENT, "loss");
  OK(whale_graph_output(g, WHALE_STR("r"), out[0]));
  FAILS(whale_graph_output(g, WHALE_STR("r"), out[0]), WHALE_ALREADY_EXISTS, "output 'r'");
  const int64_t* dims = NULL;
  int32_t dtype = 0;
  size_t rank = 0;
  FAILS(whale_graph_value(g, 55, &dtype, &dims, &rank), WHALE_INVALID_ARGUMENT, "value 55");
  OK(whale_graph_value(g, out[0], &dtype, &dims, &rank));
  CHECK(dtype == WHALE_F32 && rank == 2 && dims[0] == 4 && dims[1] == 3);
  in[0] = out[0];
  OK(whale_graph_op(g, WHALE_STR("reduce_sum"), in, 1, NULL, 0, NULL, out, 2, &n));
  whale_training_options t = WHALE_TRAINING_OPTIONS_INIT;
  t.beta1 = 2;
  FAILS(whale_graph_minimize(g, out[0], &t), WHALE_INVALID_ARGUMENT, "beta1");
  t.beta1 = 0.9;
  t.optimizer = 55;
  FAILS(whale_graph_minimize(g, out[0], &t), WHALE_INVALID_ARGUMENT, "options.optimizer");
  whale_plan* plan = NULL;
  whale_cluster* cluster = NULL;
  OK(whale_cluster_create(engine, WHALE_STR("ref:2"), &cluster));
  FAILS(whale_plan_create(engine, g, cluster, NULL, &plan), WHALE_FAILED_PRECONDITION, "not sealed");
  CHECK(plan == NULL);
  FAILS(whale_graph_default_strategy(g, WHALE_STR("replica(")), WHALE_INVALID_ARGUMENT, "");
  whale_cluster_release(cluster);
  whale_graph_release(g);
}

/* Scopes by number, beside those that are open. */
static void test_scopes(void) {
  const int64_t dims[] = {4, 3};
  whale_graph* g;
  whale_value x, w, out[1] = {-7};
  whale_scope outer = -7, inner = -7, none = -7;
  size_t n = 0;
  whale_text text = {NULL, 0};
  OK(whale_graph_create(engine, WHALE_STR("scopes"), &g));
  OK(whale_graph_input(g, WHALE_STR("x"), WHALE_F32, dims, 2, 0, &x));
  whale_scope_options scope = WHALE_SCOPE_OPTIONS_INIT;
  scope.kind = WHALE_SCOPE_REPLICA;
  OK(whale_graph_scope(g, 0, &scope, &outer));
  scope.kind = WHALE_SCOPE_NAME;
  scope.name = WHALE_STR("block");
  OK(whale_graph_scope(g, outer, &scope, &inner));
  FAILS(whale_graph_scope(g, 99, &scope, &none), WHALE_INVALID_ARGUMENT,
        "`parent` is 99; graph 'scopes' has scopes 1 to 2");
  FAILS(whale_graph_scope(g, -2, &scope, &none), WHALE_INVALID_ARGUMENT, "`parent` is -2");
  FAILS(whale_graph_scope(g, 0, NULL, &none), WHALE_INVALID_ARGUMENT, "`options` is NULL");
  FAILS(whale_graph_scope(g, 0, &scope, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  CHECK(none == -7 && outer == 1 && inner == 2);
  scope.name = WHALE_STR("open");
  OK(whale_graph_scope_begin(g, &scope));
  whale_parameter_options p = WHALE_PARAMETER_OPTIONS_INIT;
  p.scope = inner;
  OK(whale_graph_parameter(g, WHALE_STR("w"), WHALE_F32, dims, 2, &p, &w));
  p.scope = WHALE_ROOT;
  OK(whale_graph_parameter(g, WHALE_STR("r"), WHALE_F32, dims, 2, &p, &w));
  OK(whale_graph_parameter(g, WHALE_STR("o"), WHALE_F32, dims, 2, NULL, &w));
  p.scope = 77;
  FAILS(whale_graph_parameter(g, WHALE_STR("z"), WHALE_F32, dims, 2, &p, &w), WHALE_INVALID_ARGUMENT, "options.scope");
  whale_op_options o = WHALE_OP_OPTIONS_INIT;
  const whale_scope where[] = {inner, outer, WHALE_ROOT, 0};
  for (int i = 0; i < 4; ++i) {
    o.scope = where[i];
    OK(whale_graph_op(g, WHALE_STR("relu"), &x, 1, NULL, 0, &o, out, 1, &n));
  }
  o.scope = 77;
  FAILS(whale_graph_op(g, WHALE_STR("relu"), &x, 1, NULL, 0, &o, out, 1, &n), WHALE_INVALID_ARGUMENT, "options.scope");
  /* Opened by number, again and again. */
  for (int i = 0; i < 4; ++i) {
    OK(whale_graph_scope_open(g, where[i]));
    OK(whale_graph_op(g, WHALE_STR("tanh"), &x, 1, NULL, 0, NULL, out, 1, &n));
    OK(whale_graph_scope_end(g));
  }
  FAILS(whale_graph_scope_open(g, 77), WHALE_INVALID_ARGUMENT, "`scope` is 77; graph 'scopes' has scopes 1 to 3");
  FAILS(whale_graph_scope_open(NULL, 1), WHALE_INVALID_ARGUMENT, "`graph` is NULL");
  OK(whale_graph_scope_end(g));
  FAILS(whale_graph_scope_end(g), WHALE_FAILED_PRECONDITION, "no scope is open");
  OK(whale_graph_json(g, &text));
  CHECK(contains(text, "\"name\":\"block.w\"") && contains(text, "\"name\":\"r\"") &&
        contains(text, "\"name\":\"open.o\""));
  CHECK(contains(text, "\"name\":\"block.relu\",\"inputs\":[0],\"outputs\":[4],\"scope\":2,"));
  CHECK(contains(text, "\"name\":\"relu\",\"inputs\":[0],\"outputs\":[5],\"scope\":1,"));
  CHECK(contains(text, "\"name\":\"relu_2\",\"inputs\":[0],\"outputs\":[6],\"scope\":0,"));
  CHECK(contains(text, "\"name\":\"open.relu\",\"inputs\":[0],\"outputs\":[7],\"scope\":3,"));
  CHECK(contains(text, "\"name\":\"block.tanh\",\"inputs\":[0],\"outputs\":[8],\"scope\":2,"));
  CHECK(contains(text, "\"name\":\"tanh\",\"inputs\":[0],\"outputs\":[9],\"scope\":1,"));
  CHECK(contains(text, "\"name\":\"tanh_2\",\"inputs\":[0],\"outputs\":[10],\"scope\":0,"));
  CHECK(contains(text, "\"name\":\"open.tanh\",\"inputs\":[0],\"outputs\":[11],\"scope\":3,"));
  whale_text_release(&text);
  OK(whale_graph_seal(g));
  FAILS(whale_graph_scope(g, 0, &scope, &none), WHALE_FAILED_PRECONDITION, "sealed");
  FAILS(whale_graph_scope_open(g, 1), WHALE_FAILED_PRECONDITION, "sealed");
  whale_graph_release(g);
}

/* Constants and initial values from data, parameter groups; what comes of them is tested in the Python SDK. */
static void test_data_and_groups(void) {
  float data[4][3] = {{1, 2, 3}};
  const int64_t dims[] = {4, 3}, other_dims[] = {3};
  whale_graph* g;
  whale_value c, w, v = -7;
  whale_tensor* t;
  whale_text text = {NULL, 0};
  OK(whale_graph_create(engine, WHALE_STR("data"), &g));
  OK(whale_tensor_view(WHALE_F32, dims, 2, data, &t));
  OK(whale_graph_constant(g, WHALE_STR("c"), t, &c));
  FAILS(whale_graph_constant(g, WHALE_STR("c"), t, &v), WHALE_ALREADY_EXISTS, "constant 'c'");
  FAILS(whale_graph_constant(g, WHALE_STR("d"), NULL, &v), WHALE_INVALID_ARGUMENT, "`tensor` is NULL");
  whale_parameter_options p = WHALE_PARAMETER_OPTIONS_INIT;
  p.init = WHALE_INIT_DATA;
  FAILS(whale_graph_parameter(g, WHALE_STR("w"), WHALE_F32, dims, 2, &p, &v), WHALE_INVALID_ARGUMENT, "`options.data`");
  p.data = t;
  FAILS(whale_graph_parameter(g, WHALE_STR("w"), WHALE_F32, other_dims, 1, &p, &v), WHALE_INVALID_ARGUMENT,
        "its initial values are [4, 3]");
  FAILS(whale_graph_parameter(g, WHALE_STR("w"), WHALE_I32, dims, 2, &p, &v), WHALE_INVALID_ARGUMENT,
        "initial values are f32");
  CHECK(v == -7);
  OK(whale_graph_parameter(g, WHALE_STR("w"), WHALE_F32, dims, 2, &p, &w));
  p.init = WHALE_INIT_ONES;
  FAILS(whale_graph_parameter(g, WHALE_STR("o"), WHALE_F32, dims, 2, &p, &v), WHALE_INVALID_ARGUMENT, "`options.data`");
  whale_tensor_release(t);

  whale_group_options o = WHALE_GROUP_OPTIONS_INIT;
  FAILS(whale_graph_parameter_group(g, WHALE_STR("w"), NULL), WHALE_INVALID_ARGUMENT, "`options` is NULL");
  FAILS(whale_graph_parameter_group(g, WHALE_STR(""), &o), WHALE_INVALID_ARGUMENT, "`pattern` is empty");
  FAILS(whale_graph_parameter_group(g, WHALE_STR("c"), &o), WHALE_NOT_FOUND, "matches 'c'"); /* not trained */
  o.zeros = WHALE_ZERO_BETA1;
  FAILS(whale_graph_parameter_group(g, WHALE_STR("w"), &o), WHALE_INVALID_ARGUMENT, "options.zeros");
  o.zeros = WHALE_ZERO_WEIGHT_DECAY, o.weight_decay = 1;
  FAILS(whale_graph_parameter_group(g, WHALE_STR("w"), &o), WHALE_INVALID_ARGUMENT, "options.weight_decay is meant");
  o.zeros = 0, o.weight_decay = -2;
  FAILS(whale_graph_parameter_group(g, WHALE_STR("w"), &o), WHALE_INVALID_ARGUMENT, "options.weight_decay");
  o.weight_decay = 0, o.learning_rate_factor = NAN;
  FAILS(whale_graph_parameter_group(g, WHALE_STR("w"), &o), WHALE_INVALID_ARGUMENT, "options.learning_rate_factor");
  o.learning_rate_factor = 0;
  OK(whale_graph_parameter_group(g, WHALE_STR("?"), &o)); /* the defaults */
  OK(whale_graph_json(g, &text));
  CHECK(contains(text, "\"decay\":true,\"learning_rate_factor\":1.0,\"weight_decay\":null"));
  whale_text_release(&text);
  o.zeros = WHALE_ZERO_LEARNING_RATE | WHALE_ZERO_WEIGHT_DECAY;
  OK(whale_graph_parameter_group(g, WHALE_STR("*w*"), &o));
  OK(whale_graph_json(g, &text));
  CHECK(contains(text, "\"learning_rate_factor\":0.0,\"weight_decay\":0.0"));
  whale_text_release(&text);
  OK(whale_graph_seal(g));
  FAILS(whale_graph_parameter_group(g, WHALE_STR("w"), &o), WHALE_FAILED_PRECONDITION, "sealed");
  whale_graph_release(g);
}

/* sum(x^2) by x, and what has no gradient; numbers are checked in the Python SDK's tests. */
static void test_gradients(void) {
  const int64_t dims[] = {4, 3};
  whale_graph* g;
  whale_value x, other, y, made[2] = {-7, -7};
  int32_t dtype = 0;
  const int64_t* shape = NULL;
  size_t rank = 0;
  OK(whale_graph_create(engine, WHALE_STR("gradients"), &g));
  OK(whale_graph_input(g, WHALE_STR("x"), WHALE_F32, dims, 2, 0, &x));
  OK(whale_graph_input(g, WHALE_STR("other"), WHALE_F32, dims, 2, 0, &other));
  y = op(g, "square", &x, 1);
  y = op(g, "reduce_sum", &y, 1);
  const whale_value by[] = {x, other};
  OK(whale_graph_gradients(g, y, by, 2, made));
  CHECK(made[0] > y && made[1] == WHALE_NONE);
  OK(whale_graph_value(g, made[0], &dtype, &shape, &rank));
  CHECK(dtype == WHALE_F32 && rank == 2 && shape[0] == 4 && shape[1] == 3);
  made[0] = made[1] = -7;
  FAILS(whale_graph_gradients(g, 99, by, 2, made), WHALE_INVALID_ARGUMENT, "value 99");
  FAILS(whale_graph_gradients(g, x, by, 2, made), WHALE_INVALID_ARGUMENT, "not computed by any op");
  FAILS(whale_graph_gradients(g, y, by, 0, made), WHALE_INVALID_ARGUMENT, "`by` is empty");
  FAILS(whale_graph_gradients(g, y, NULL, 2, made), WHALE_INVALID_ARGUMENT, "`by` is NULL");
  FAILS(whale_graph_gradients(g, y, by, 2, NULL), WHALE_INVALID_ARGUMENT, "`outputs` is NULL");
  CHECK(made[0] == -7 && made[1] == -7);
  OK(whale_graph_seal(g));
  FAILS(whale_graph_gradients(g, y, by, 2, made), WHALE_FAILED_PRECONDITION, "sealed");
  whale_graph_release(g);
}

/* ---- clusters and plans
 * ------------------------------------------------------------------------------------------------------ */
static void test_cluster(void) {
  whale_cluster* c = NULL;
  const char* bad[] = {"",     "cpu:0",  "cpu:-1",      "gpu:2", "ref:2,", ",ref:1", "ref:99999999999999999999",
                       "cpu@", "ref:2x", "null:1 ref:1"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
    whale_status* s = whale_cluster_create(engine, str(bad[i]), &c);
    if (s == NULL) fprintf(stderr, "devices '%s' were accepted\n", bad[i]);
    CHECK(s != NULL && c == NULL && whale_status_message(s).size > 0);
    whale_status_release(s);
  }
  OK(whale_cluster_create(engine, WHALE_STR("ref:2,null:1"), &c));
  CHECK(whale_cluster_size(c) == 3 && whale_cluster_size(NULL) == 0);
  whale_device d = WHALE_DEVICE_INIT;
  OK(whale_cluster_device(c, 2, &d));
  CHECK(d.kind == WHALE_DEVICE_NULL && d.node == 0 && d.rank == 2 && d.local_rank == 2 && d.memory_bytes == 0);
  FAILS(whale_cluster_device(c, 3, &d), WHALE_INVALID_ARGUMENT, "`index` is 3; there are 3 devices");
  FAILS(whale_cluster_device(NULL, 0, &d), WHALE_INVALID_ARGUMENT, "`cluster` is NULL");
  whale_cluster_release(c);
  OK(whale_cluster_create(engine, WHALE_STR("2xnull-16GB:3"), &c));
  OK(whale_cluster_device(c, 4, &d));
  CHECK(d.kind == WHALE_DEVICE_NULL && d.node == 1 && d.rank == 4 && d.local_rank == 1);
  CHECK(d.memory_bytes == 16000000000);
  whale_cluster_release(c);
  whale_cluster_release(NULL);
}

static whale_plan* planned(whale_graph* g, const char* devices) {
  whale_cluster* c;
  whale_plan* p;
  OK(whale_cluster_create(engine, str(devices), &c));
  OK(whale_plan_create(engine, g, c, NULL, &p));
  whale_cluster_release(c);
  return p;
}

static void test_plan(void) {
  whale_graph* g = mlp();
  whale_plan *p = planned(g, "ref:2"), *again = NULL;
  whale_graph_release(g);
  whale_text text = {NULL, 0}, printed = {NULL, 0};
  whale_bytes bytes = {NULL, 0}, more = {NULL, 0};
  OK(whale_plan_print(p, &text));
  CHECK(contains(text, "matmul") && contains(text, "all_reduce"));
  OK(whale_plan_serialize(p, &bytes));
  OK(whale_plan_parse(engine, bytes.data, bytes.size, &again));
  OK(whale_plan_serialize(again, &more));
  CHECK(more.size == bytes.size && memcmp(more.data, bytes.data, more.size) == 0);
  whale_bytes_release(&more);
  OK(whale_plan_print(again, &printed));
  CHECK(strcmp(printed.data, text.data) == 0);
  whale_text_release(&text);
  whale_text_release(&printed);
  whale_plan_release(again);
  again = NULL;
  FAILS(whale_plan_parse(engine, bytes.data, bytes.size - 100, &again), WHALE_DATA_LOSS, "the plan is damaged");
  CHECK(again == NULL);
  OK(whale_plan_in_float64(p, &again));
  OK(whale_plan_print(again, &text));
  CHECK(contains(text, "f64") && !contains(text, "f32") && contains(text, "all_reduce"));
  whale_text_release(&text);
  whale_plan_release(again);
  again = NULL;
  FAILS(whale_plan_in_float64(NULL, &again), WHALE_INVALID_ARGUMENT, "`plan` is NULL");
  FAILS(whale_plan_in_float64(p, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  CHECK(again == NULL);
  whale_bytes_release(&bytes);
  whale_device d = WHALE_DEVICE_INIT;
  whale_memory m = WHALE_MEMORY_INIT;
  CHECK(whale_plan_device_count(p) == 2 && whale_plan_device_count(NULL) == 0);
  OK(whale_plan_device(p, 1, &d));
  CHECK(d.kind == WHALE_DEVICE_REF && d.rank == 1 && d.local_rank == 1);
  FAILS(whale_plan_device(p, 2, &d), WHALE_INVALID_ARGUMENT, "`index` is 2");
  OK(whale_plan_memory(p, 1, &m));
  CHECK(m.parameters == (int64_t)sizeof(float) * (IN * HIDDEN + HIDDEN + HIDDEN * OUT) && m.gradients > 0);
  CHECK(m.total == m.parameters + m.gradients + m.state + m.buffers + m.copies + m.activations);
  FAILS(whale_plan_memory(p, 2, &m), WHALE_INVALID_ARGUMENT, "`device` is 2");
  OK(whale_plan_summary(p, &text));
  CHECK(text.size > 0);
  whale_text_release(&text);
  OK(whale_plan_json(p, &text));
  CHECK(text.data[0] == '{');
  whale_text_release(&text);
  OK(whale_plan_reshards(p, &text));
  CHECK(text.size > 0);
  whale_text_release(&text);
  OK(whale_plan_reshards_json(p, &text));
  CHECK(text.data[0] == '[');
  whale_text_release(&text);
  OK(whale_plan_choices(p, &text));
  CHECK(text.size > 0);
  whale_text_release(&text);
  OK(whale_plan_choices_json(p, &text));
  CHECK(text.data[0] == '{');
  whale_text_release(&text);
  OK(whale_plan_timeline_json(p, &text));
  CHECK(text.data[0] == '{');
  whale_text_release(&text);
  OK(whale_plan_report_html(p, NULL, 0, &text));
  CHECK(strncmp(text.data, "<!doctype html>", 15) == 0 && strstr(text.data, "</html>") != NULL);
  whale_text_release(&text);
  whale_str traces[2] = {WHALE_STR("\n[{\"ph\": \"X\", \"pid\": 1, \"tid\": 0, \"ts\": 0, \"dur\": 1, \"name\": \"</script>\"}]"),
                         {NULL, 0}};
  OK(whale_plan_report_html(p, traces, 1, &text));
  CHECK(strstr(text.data, "\\u003c/script\\u003e") != NULL);
  whale_text_release(&text);
  FAILS(whale_plan_report_html(p, traces, 2, &text), WHALE_INVALID_ARGUMENT, "trace 2 is no JSON");
  traces[1].size = 3;
  FAILS(whale_plan_report_html(p, traces, 2, &text), WHALE_INVALID_ARGUMENT, "`traces` is NULL");
  FAILS(whale_plan_report_html(p, NULL, 2, &text), WHALE_INVALID_ARGUMENT, "`traces` is NULL");
  FAILS(whale_plan_report_html(p, NULL, 0, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  /* A proof: without options, stopped by a token, also one that was triggered before, and by a timeout. */
  whale_proof_options po = WHALE_PROOF_OPTIONS_INIT;
  OK(whale_plan_prove_json(p, NULL, &text));
  CHECK(contains(text, "\"verdict\":\"proven\""));
  OK(whale_plan_prove(p, &printed));
  CHECK(strcmp(printed.data, text.data) == 0);
  whale_text_release(&text);
  whale_text_release(&printed);
  OK(whale_cancel_create(&po.cancel));
  po.timeout_seconds = 600, po.progress = 1;
  OK(whale_plan_prove_json(p, &po, &text));
  whale_text_release(&text);
  whale_cancel_trigger(po.cancel);
  FAILS(whale_plan_prove_json(p, &po, &text), WHALE_CANCELLED, "proving was cancelled");
  whale_cancel_release(po.cancel);
  po.cancel = NULL, po.timeout_seconds = 1e-9;
  FAILS(whale_plan_prove_json(p, &po, &text), WHALE_DEADLINE_EXCEEDED,
        "proving took longer than its timeout of 1e-09 seconds");
  po.timeout_seconds = -1;
  FAILS(whale_plan_prove_json(p, &po, &text), WHALE_INVALID_ARGUMENT, "number of seconds");
  po.timeout_seconds = 0, po.progress = 2;
  FAILS(whale_plan_prove_json(p, &po, &text), WHALE_INVALID_ARGUMENT, "options.progress");
  FAILS(whale_plan_prove_json(p, NULL, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_plan_prove_json(NULL, NULL, &text), WHALE_INVALID_ARGUMENT, "`plan` is NULL");
  FAILS(whale_plan_file_prove_json(NULL, WHALE_STR("x.plan"), NULL, &text), WHALE_INVALID_ARGUMENT,
        "`engine` is NULL");
  FAILS(whale_plan_file_prove_json(engine, WHALE_STR(""), NULL, &text), WHALE_INVALID_ARGUMENT, "path");
  FAILS(whale_plan_file_prove_json(engine, WHALE_STR("/nowhere/x.plan"), NULL, &text), WHALE_NOT_FOUND, "x.plan");
  FAILS(whale_plan_file_prove_json(engine, WHALE_STR("x.plan"), NULL, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_plan_timeline_json(p, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_plan_serialize(p, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_plan_print(p, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_plan_summary(p, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_plan_json(p, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_plan_reshards_json(p, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_plan_choices_json(p, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  whale_plan_release(p);
  whale_plan_release(NULL);

  g = mlp();
  whale_cluster* c;
  OK(whale_cluster_create(engine, WHALE_STR("ref:2"), &c));
  whale_plan_options o = WHALE_PLAN_OPTIONS_INIT;
  o.strategy = WHALE_STR("replica(3)");
  o.precision = 9;
  FAILS(whale_plan_create(engine, g, c, &o, &p), WHALE_INVALID_ARGUMENT, "options.precision");
  FAILS(whale_plan_estimate(engine, g, c, &o, &text), WHALE_INVALID_ARGUMENT, "options.precision");
  o.precision = 0;
  whale_str unknown = WHALE_STR("no_such_tensor");
  o.strategy = WHALE_STR("");
  o.fetch = &unknown;
  o.fetch_count = 1;
  p = NULL;
  FAILS(whale_plan_create(engine, g, c, &o, &p), WHALE_NOT_FOUND, "no_such_tensor");
  CHECK(p == NULL);
  /* Planning that is stopped: by a token, also one that was triggered before, and by a timeout. */
  o.fetch_count = 0;
  whale_cancel* cancel = NULL;
  OK(whale_cancel_create(&cancel));
  o.cancel = cancel;
  o.timeout_seconds = 600;
  OK(whale_plan_create(engine, g, c, &o, &p));
  whale_cancel_trigger(cancel);
  FAILS(whale_plan_reshards(p, &text), WHALE_CANCELLED, "planning was cancelled"); /* plans once more */
  FAILS(whale_plan_choices(p, &text), WHALE_CANCELLED, "planning was cancelled");
  FAILS(whale_plan_prove(p, &text), WHALE_CANCELLED, "proving was cancelled");
  whale_plan_release(p);
  p = NULL;
  FAILS(whale_plan_create(engine, g, c, &o, &p), WHALE_CANCELLED, "planning was cancelled");
  FAILS(whale_plan_estimate(engine, g, c, &o, &text), WHALE_CANCELLED, "planning was cancelled");
  whale_cancel_release(cancel);
  o.cancel = NULL;
  o.timeout_seconds = 1e-9;
  FAILS(whale_plan_create(engine, g, c, &o, &p), WHALE_DEADLINE_EXCEEDED, "timeout of 1e-09 seconds");
  o.timeout_seconds = -1;
  FAILS(whale_plan_create(engine, g, c, &o, &p), WHALE_INVALID_ARGUMENT, "number of seconds");
  o.timeout_seconds = 0;
  OK(whale_plan_estimate(engine, g, c, &o, &text));
  CHECK(text.size > 0);
  whale_text_release(&text);
  OK(whale_plan_estimate_json(engine, g, c, NULL, &text));
  CHECK(text.data[0] == '{');
  whale_text_release(&text);
  o.quick = 1;
  OK(whale_plan_estimate(engine, g, c, &o, &text));
  CHECK(text.size > 0);
  whale_text_release(&text);
  o.quick = 2;
  FAILS(whale_plan_estimate(engine, g, c, &o, &text), WHALE_INVALID_ARGUMENT, "options.quick");
  o.quick = 0;
  FAILS(whale_plan_estimate(engine, g, c, &o, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_plan_estimate(engine, NULL, c, &o, &text), WHALE_INVALID_ARGUMENT, "`graph` is NULL");
  o.accumulation = 1000000;
  FAILS(whale_plan_create(engine, g, c, &o, &p), WHALE_INVALID_ARGUMENT, "1000000 micro-batches of a batch of 8");
  CHECK(p == NULL);

  /* What strangers may ask for. */
  whale_engine_options eo = WHALE_ENGINE_OPTIONS_INIT;
  whale_engine* strict = NULL;
  eo.max_ops = 2;
  OK(whale_engine_create(&eo, &strict));
  OK(whale_graph_serialize(g, &bytes));
  whale_graph* parsed = NULL;
  FAILS(whale_graph_parse(strict, bytes.data, bytes.size, &parsed), WHALE_RESOURCE_EXHAUSTED, "max_ops allows 2");
  FAILS(whale_graph_parse(strict, NULL, 0, &parsed), WHALE_INVALID_ARGUMENT, "it is empty");
  FAILS(whale_graph_parse(strict, NULL, 5, &parsed), WHALE_INVALID_ARGUMENT, "`data` is NULL, but its count is 5");
  CHECK(parsed == NULL);
  whale_bytes_release(&bytes);
  whale_engine_release(strict);
  strict = NULL;
  eo.max_ops = -1;
  FAILS(whale_engine_create(&eo, &strict), WHALE_INVALID_ARGUMENT, "options.max_ops");
  eo.max_ops = 0;
  eo.init_dir = WHALE_STR("/no/such/folder");
  FAILS(whale_engine_create(&eo, &strict), WHALE_NOT_FOUND, "options.init_dir");
  CHECK(strict == NULL);
  whale_cluster_release(c);
  whale_graph_release(g);
}

/* ---- sessions
 * ------------------------------------------------------------------------------------------------------------------ */
static void test_typed(whale_session* s, const int32_t* inputs, const int32_t* outputs) {
  whale_port port = WHALE_PORT_INIT;
  CHECK(whale_session_input_count(s) == 2 && whale_session_output_count(s) == 2);
  CHECK(whale_session_input_count(NULL) == 0 && whale_session_output_count(NULL) == 0);
  OK(whale_session_input_port(s, inputs[0], &port));
  CHECK(same(port.name, "x") && port.dtype == WHALE_F32 && port.batch_dim == 0 && port.rank == 2);
  CHECK(port.dims[0] == BATCH && port.dims[1] == IN && port.in_step == 1 && port.in_eval == 1);
  OK(whale_session_output_port(s, outputs[0], &port));
  CHECK(same(port.name, "loss") && port.rank == 0 && port.batch_dim == -1 && port.in_step == 1);
  OK(whale_session_output_port(s, outputs[1], &port));
  CHECK(same(port.name, "logits") && port.dims[1] == OUT && port.batch_dim == -1 && port.in_eval == 1);
  FAILS(whale_session_input_port(s, 2, &port), WHALE_INVALID_ARGUMENT, "no input 2");
  FAILS(whale_session_output_port(s, -1, &port), WHALE_INVALID_ARGUMENT, "no output -1");
  FAILS(whale_session_input_port(s, 0, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  port.struct_size = 0;
  FAILS(whale_session_input_port(s, 0, &port), WHALE_INVALID_ARGUMENT, "struct_size is 0");
  /* An older header's struct, which ended before `dims`: what lies behind it stays. */
  memset(&port, 0x5a, sizeof port);
  port.struct_size = offsetof(whale_port, dims);
  const int64_t* behind = port.dims;
  OK(whale_session_input_port(s, inputs[1], &port));
  CHECK(port.struct_size == offsetof(whale_port, dims) && same(port.name, "y") && port.dtype == WHALE_I32);
  CHECK(port.dims == behind);
  /* A newer header's: what this library does not know stays. */
  struct {
    whale_port port;
    int64_t newer;
  } longer;
  longer.port.struct_size = sizeof longer, longer.newer = 5;
  OK(whale_session_input_port(s, inputs[1], &longer.port));
  CHECK(longer.port.rank == 1 && longer.newer == 5);

  whale_variable v = WHALE_VARIABLE_INIT;
  CHECK(whale_session_variable_count(s) == 3 && whale_session_variable_count(NULL) == 0);
  OK(whale_session_variable(s, 0, &v));
  CHECK(same(v.name, "body.w1") && v.role == WHALE_ROLE_PARAMETER && v.dtype == WHALE_F32 && v.rank == 2);
  CHECK(v.dims[0] == IN && v.dims[1] == HIDDEN && v.copies >= 1);
  FAILS(whale_session_variable(s, 3, &v), WHALE_INVALID_ARGUMENT, "`index` is 3; the session has 3");
  const int32_t* devices = NULL;
  size_t count = 99;
  FAILS(whale_session_variable_devices(s, 3, 0, &devices, &count), WHALE_INVALID_ARGUMENT, "`index` is 3");
  FAILS(whale_session_variable_devices(s, 0, v.copies, &devices, &count), WHALE_INVALID_ARGUMENT,
        "variable 'body.w1' has ");
  FAILS(whale_session_variable_devices(s, 0, -1, &devices, &count), WHALE_INVALID_ARGUMENT, "`copy` is -1");
  FAILS(whale_session_variable_devices(s, 0, 0, NULL, &count), WHALE_INVALID_ARGUMENT, "`devices` is NULL");
  FAILS(whale_session_variable_devices(s, 0, 0, &devices, NULL), WHALE_INVALID_ARGUMENT, "`count` is NULL");
  CHECK(devices == NULL && count == 99);
  for (int32_t copy = 0; copy < v.copies; ++copy) { /* of replicas each device has one */
    OK(whale_session_variable_devices(s, 0, copy, &devices, &count));
    CHECK(count == 1 && devices[0] == copy);
  }

  whale_memory m = WHALE_MEMORY_INIT;
  OK(whale_session_memory(s, 0, &m));
  CHECK(m.parameters == (int64_t)sizeof(float) * (IN * HIDDEN + HIDDEN + HIDDEN * OUT) && m.state == 0 && m.host == 0);
  CHECK(m.total == m.parameters + m.gradients + m.inputs + m.activations + m.workspace && m.activations > 0);
  FAILS(whale_session_memory(s, 9, &m), WHALE_INVALID_ARGUMENT, "device 9");
}

static void test_session(const char* devices) {
  whale_graph* g = mlp();
  whale_plan* p = planned(g, devices);
  whale_session* s = NULL;
  whale_session_options so = WHALE_SESSION_OPTIONS_INIT;
  so.seed = 3;
  so.no_pin = 2;
  FAILS(whale_session_create(engine, p, &so, &s), WHALE_INVALID_ARGUMENT, "no_pin");
  so.no_pin = 0, so.no_bf16 = -1;
  FAILS(whale_session_create(engine, p, &so, &s), WHALE_INVALID_ARGUMENT, "no_bf16");
  so.no_pin = 1, so.no_bf16 = 1;
  OK(whale_session_create(engine, p, &so, &s));
  whale_session_release(s);
  so.no_pin = 0;
  OK(whale_session_create(engine, p, &so, &s));
  whale_plan_release(p); /* the session keeps what it needs */
  whale_graph_release(g);

  float x[BATCH][IN];
  int32_t y[BATCH];
  for (int i = 0; i < BATCH; ++i) {
    y[i] = i % OUT;
    for (int j = 0; j < IN; ++j) x[i][j] = (float)((i * 7 + j * 3) % 11) / 11.0f - 0.5f;
  }
  const int64_t x_dims[] = {BATCH, IN}, y_dims[] = {BATCH};
  int32_t inputs[3], outputs[2] = {-7, -7};
  whale_tensor *in[3] = {NULL, NULL, NULL}, *out[2] = {NULL, NULL};
  OK(whale_tensor_view(WHALE_F32, x_dims, 2, x, &in[0]));
  OK(whale_tensor_view(WHALE_I32, y_dims, 1, y, &in[1]));
  FAILS(whale_session_output(s, WHALE_STR("nothing"), &outputs[0]), WHALE_NOT_FOUND,
        "no output 'nothing'; the plan has: ");
  FAILS(whale_session_input(s, WHALE_STR("z"), &outputs[0]), WHALE_NOT_FOUND, "no input 'z'; the plan has: x, y");
  FAILS(whale_session_input(s, WHALE_STR("x"), NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  CHECK(outputs[0] == -7);
  OK(whale_session_input(s, WHALE_STR("x"), &inputs[0]));
  OK(whale_session_input(s, WHALE_STR("y"), &inputs[1]));
  OK(whale_session_output(s, WHALE_STR("loss"), &outputs[0]));
  OK(whale_session_output(s, WHALE_STR("logits"), &outputs[1]));
  test_typed(s, inputs, outputs);
  whale_event* e = NULL;
  int32_t done = 7;
  double first = 0, last = 0;
  for (int step = 0; step < 30; ++step) {
    OK(whale_session_step(s, inputs, in, 2, outputs, out, 2, NULL, &e));
    OK(whale_event_wait(e, -1, &done));
    CHECK(done == 1 && whale_event_query(e) == 1);
    whale_event_release(e);
    e = NULL;
    CHECK(whale_tensor_rank(out[0]) == 0 && whale_tensor_dtype(out[0]) == WHALE_F32);
    last = *(float*)whale_tensor_data(out[0]);
    if (step == 0) first = last;
  }
  CHECK(last < 0.9 * first && last > 0);
  CHECK(whale_tensor_rank(out[1]) == 2 && whale_tensor_dims(out[1])[0] == BATCH && whale_tensor_dims(out[1])[1] == OUT);
  CHECK(whale_session_iteration(s) == 30 && whale_session_updates(s) == 30);
  CHECK(whale_session_learning_rate(s) == 0.5);

  /* Evaluation and half a batch. */
  whale_tensor* logits = NULL;
  OK(whale_session_eval(s, inputs, in, 1, &outputs[1], &logits, 1, NULL, &e));
  OK(whale_event_wait(e, -1, &done));
  whale_event_release(e);
  e = NULL;
  CHECK(whale_tensor_bytes(logits) == BATCH * OUT * sizeof(float));
  whale_tensor_release(logits);
  CHECK(whale_session_iteration(s) == 30);

  /* Parameters. */
  whale_tensor* w = NULL;
  OK(whale_session_read(s, WHALE_STR("body.w1"), &w));
  CHECK(whale_tensor_rank(w) == 2 && whale_tensor_dims(w)[0] == IN && whale_tensor_dims(w)[1] == HIDDEN);
  CHECK(((float*)whale_tensor_data(w))[0] != 0.0f);
  ((float*)whale_tensor_data(w))[0] = 9.0f;
  OK(whale_session_write(s, WHALE_STR("body.w1"), w));
  whale_tensor_release(w);
  w = NULL;
  OK(whale_session_read(s, WHALE_STR("body.w1"), &w));
  CHECK(((float*)whale_tensor_data(w))[0] == 9.0f);
  whale_tensor* copy = NULL;
  OK(whale_session_read_copy(s, WHALE_STR("body.w1"), 0, NULL, &copy));
  CHECK(((float*)whale_tensor_data(copy))[0] == 9.0f);
  whale_tensor_release(copy);
  copy = NULL;
  FAILS(whale_session_read_copy(s, WHALE_STR("body.w1"), 99, NULL, &copy), WHALE_INVALID_ARGUMENT, "copy 99");
  FAILS(whale_session_read_copy(s, WHALE_STR("body.w1"), -1, NULL, &copy), WHALE_INVALID_ARGUMENT, "copy -1");
  CHECK(copy == NULL);
  FAILS(whale_session_write(s, WHALE_STR("body.w2"), w), WHALE_INVALID_ARGUMENT, "body.w2");
  FAILS(whale_session_write(s, WHALE_STR("body.w1"), NULL), WHALE_INVALID_ARGUMENT, "`tensor` is NULL");
  whale_tensor_release(w);
  w = NULL;
  FAILS(whale_session_read(s, WHALE_STR("body.w9"), &w), WHALE_NOT_FOUND, "body.w9");
  CHECK(w == NULL);
  whale_text text = {NULL, 0};
  OK(whale_session_variables_json(s, &text));
  CHECK(contains(text, "{\"name\":\"body.w1\",\"role\":\"parameter\",\"dtype\":\"f32\",\"dims\":[5,7],\"copies\":[["));
  whale_text_release(&text);
  OK(whale_session_report_json(s, &text));
  CHECK(text.data[0] == '{' || text.data[0] == '[');
  whale_text_release(&text);

  /* Everything wrong with a step; the session must be as before it. */
  FAILS(whale_session_step(s, inputs, in, 1, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT, "y"); /* missing */
  inputs[2] = inputs[1];
  FAILS(whale_session_step(s, inputs, in, 3, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT,
        "input 'y' has no tensor"); /* NULL */
  in[2] = in[0], inputs[2] = 2;
  FAILS(whale_session_step(s, inputs, in, 3, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT,
        "no input 2; the plan has 2"); /* extra */
  inputs[2] = -1;
  FAILS(whale_session_step(s, inputs, in, 3, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT, "no input -1");
  inputs[2] = inputs[0];
  FAILS(whale_session_step(s, inputs, in, 3, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT, "x"); /* twice */
  FAILS(whale_session_step(s, NULL, in, 2, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT, "`inputs` is NULL");
  FAILS(whale_session_step(s, inputs, NULL, 2, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT,
        "`input_tensors` is NULL");
  FAILS(whale_session_step(s, inputs, in, 2, NULL, out, 1, NULL, &e), WHALE_INVALID_ARGUMENT, "`outputs` is NULL");
  FAILS(whale_session_step(s, inputs, in, 2, outputs, NULL, 1, NULL, &e), WHALE_INVALID_ARGUMENT,
        "`output_tensors` is NULL");
  FAILS(whale_session_step(s, inputs, in, 2, NULL, NULL, 0, NULL, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  whale_tensor* wrong[2] = {in[1], in[0]};
  FAILS(whale_session_step(s, inputs, wrong, 2, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT, "'x'"); /* dtypes */
  const int64_t odd_dims[] = {BATCH, IN - 1};
  wrong[1] = in[1];
  OK(whale_tensor_view(WHALE_F32, odd_dims, 2, x, &wrong[0]));
  FAILS(whale_session_step(s, inputs, wrong, 2, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT, "'x'"); /* shape */
  whale_tensor_release(wrong[0]);
  int32_t number = 2;
  whale_tensor* fetched = NULL;
  FAILS(whale_session_step(s, inputs, in, 2, &number, &fetched, 1, NULL, &e), WHALE_INVALID_ARGUMENT,
        "no output 2; the plan has 2");
  CHECK(fetched == NULL);
  fetched = out[0];
  FAILS(whale_session_step(s, inputs, in, 2, &outputs[1], &fetched, 1, NULL, &e), WHALE_INVALID_ARGUMENT, "logits");
  CHECK(e == NULL && fetched == out[0]);
  CHECK(whale_session_iteration(s) == 30);
  CHECK(whale_session_updates(s) == 30);

  /* A token that was triggered before the run. */
  whale_cancel* cancel = NULL;
  OK(whale_cancel_create(&cancel));
  whale_cancel_trigger(cancel);
  whale_status* status = whale_session_step(s, inputs, in, 2, NULL, NULL, 0, cancel, &e);
  if (status == NULL) {
    done = 0;
    status = whale_event_wait(e, -1, &done);
    CHECK(done == 1); /* it has ended, though not well */
    whale_event_release(e);
    e = NULL;
  }
  CHECK(whale_status_code(status) == WHALE_CANCELLED);
  whale_status_release(status);
  whale_cancel_release(cancel);
  CHECK(whale_session_updates(s) == 30);

  OK(whale_session_set_learning_rate(s, 0.25));
  CHECK(whale_session_learning_rate(s) == 0.25);
  FAILS(whale_session_set_learning_rate(s, NAN), WHALE_INVALID_ARGUMENT, "learning rate");
  FAILS(whale_session_set_learning_rate(s, 1e300), WHALE_INVALID_ARGUMENT, "expected 0 to 1e+30");
  FAILS(whale_session_set_learning_rate(s, -0.25), WHALE_INVALID_ARGUMENT, "expected 0 to 1e+30, or -1");
  CHECK(whale_session_learning_rate(s) == 0.25);

  /* A checkpoint. */
  char folder[] = "capi_test_XXXXXX";
  CHECK(mkdtemp(folder) != NULL);
  char path[64], command[80];
  snprintf(path, sizeof path, "%s/step", folder);
  OK(whale_checkpoint_check_target(str(path)));
  FAILS(whale_checkpoint_check_target(WHALE_STR("/proc/nowhere")), WHALE_NOT_FOUND, "/proc/nowhere");
  FAILS(whale_checkpoint_check_target(WHALE_STR("")), WHALE_INVALID_ARGUMENT, "`directory`");
  OK(whale_session_save(s, str(path)));
  OK(whale_session_step(s, inputs, in, 2, NULL, NULL, 0, NULL, &e));
  OK(whale_event_wait(e, -1, &done));
  whale_event_release(e);
  OK(whale_session_load(s, str(path)));
  CHECK(whale_session_updates(s) == 30);
  FAILS(whale_session_load(s, WHALE_STR("/nonexistent")), WHALE_NOT_FOUND, "/nonexistent");
  whale_text held;
  OK(whale_checkpoint_inspect_json(str(path), &held));
  CHECK(strstr(held.data, "\"checksums\":true") != NULL && strstr(held.data, "\"updates\":30") != NULL);
  whale_text_release(&held);
  OK(whale_checkpoint_inspect(str(path), &held));
  CHECK(strstr(held.data, "every checksum is right") != NULL);
  whale_text_release(&held);
  FAILS(whale_checkpoint_inspect(str(folder), &held), WHALE_NOT_FOUND, "holds no checkpoint");
  FAILS(whale_checkpoint_inspect(str(path), NULL), WHALE_INVALID_ARGUMENT, "`out`");
  FAILS(whale_session_save(s, WHALE_STR("/proc/nowhere")), WHALE_NOT_FOUND, "/proc/nowhere");
  snprintf(command, sizeof command, "rm -r %s", folder);
  CHECK(system(command) == 0);

  for (int i = 0; i < 2; ++i) whale_tensor_release(in[i]), whale_tensor_release(out[i]);
  whale_session_release(s);
  whale_session_release(NULL);
  whale_event_release(NULL);
  whale_cancel_trigger(NULL);
  whale_cancel_release(NULL);
}

/* ---- a step while another one is under way, and a child after fork()
 * ------------------------------------------------------------------ */
enum { WIDE = 96 };
static whale_session* slow_session(void) {
  const int64_t x_dims[] = {WIDE, WIDE}, w_dims[] = {WIDE, WIDE};
  whale_graph* g;
  whale_value x, w, in[2];
  OK(whale_graph_create(engine, WHALE_STR("slow"), &g));
  OK(whale_graph_input(g, WHALE_STR("x"), WHALE_F32, x_dims, 2, 0, &x));
  whale_parameter_options normal = WHALE_PARAMETER_OPTIONS_INIT;
  normal.init = WHALE_INIT_NORMAL;
  normal.b = 0.1;
  OK(whale_graph_parameter(g, WHALE_STR("w"), WHALE_F32, w_dims, 2, &normal, &w));
  for (int i = 0; i < 8; ++i) {
    in[0] = x, in[1] = w;
    x = op(g, "matmul", in, 2);
    x = op(g, "tanh", &x, 1);
  }
  x = op(g, "reduce_mean", &x, 1);
  OK(whale_graph_minimize(g, x, NULL));
  OK(whale_graph_seal(g));
  whale_plan* p = planned(g, "ref:1");
  whale_session* s;
  OK(whale_session_create(engine, p, NULL, &s));
  whale_plan_release(p);
  whale_graph_release(g);
  return s;
}

static float wide_x[WIDE][WIDE];
static whale_status* slow_step(whale_session* s, whale_tensor** loss, whale_event** e) {
  const int64_t dims[] = {WIDE, WIDE};
  static whale_tensor* x; /* as long as any step */
  if (x == NULL) OK(whale_tensor_view(WHALE_F32, dims, 2, wide_x, &x));
  const int32_t first = 0; /* the input, and the loss */
  return whale_session_step(s, &first, &x, 1, &first, loss, 1, NULL, e);
}

static void test_busy(void) {
  whale_session* s = slow_session();
  whale_tensor *loss = NULL, *other = NULL;
  int32_t done = 0;
  int refused = 0;
  for (int i = 0; i < 20; ++i) { /* on a machine that stands still between two lines, the first step may have ended */
    whale_event *first = NULL, *second = NULL;
    OK(slow_step(s, &loss, &first));
    whale_status* status = slow_step(s, &other, &second);
    if (status == NULL) {
      OK(whale_event_wait(second, -1, &done));
    } else {
      CHECK(whale_status_code(status) == WHALE_FAILED_PRECONDITION && second == NULL && other == NULL);
      ++refused;
    }
    whale_status_release(status);
    OK(whale_event_wait(first, -1, &done));
    whale_event_release(first);
    whale_event_release(second);
    whale_tensor_release(other);
    other = NULL;
  }
  CHECK(refused > 0);
  whale_tensor_release(loss);
  whale_session_release(s);
}

/* In a child every function of the parent's session and event answers; no exception, no signal, no waiting for threads
 * that are not there. */
static void test_fork(void) {
  whale_session* s = slow_session();
  whale_tensor* loss = NULL;
  whale_event* e = NULL;
  int32_t done = 0;
  OK(slow_step(s, &loss, &e)); /* under way while the process forks */
  const pid_t child = fork();
  if (child == 0) {
    failures = 0;
    alarm(60);
    whale_event* none = NULL;
    whale_tensor* t = NULL;
    whale_text text = {NULL, 0};
    FAILS(slow_step(s, &loss, &none), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_event_wait(e, -1, &done), WHALE_FAILED_PRECONDITION, "fork()");
    (void)whale_event_query(e);
    FAILS(whale_session_read(s, WHALE_STR("w"), &t), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_write(s, WHALE_STR("w"), loss), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_variables_json(s, &text), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_report_json(s, &text), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_timeline_json(s, &text), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_trace(s, 1), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_set_learning_rate(s, 0.5), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_save(s, WHALE_STR("nowhere")), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_load(s, WHALE_STR("nowhere")), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_save_async(s, WHALE_STR("nowhere"), NULL, &none), WHALE_FAILED_PRECONDITION, "fork()");
    FAILS(whale_session_load_async(s, WHALE_STR("nowhere"), NULL, &none), WHALE_FAILED_PRECONDITION, "fork()");
    int64_t index = 0;
    FAILS(whale_event_wait_any(&e, 1, -1, &index), WHALE_FAILED_PRECONDITION, "fork()");
    whale_memory memory = WHALE_MEMORY_INIT;
    FAILS(whale_session_memory(s, 0, &memory), WHALE_FAILED_PRECONDITION, "fork()");
    CHECK(whale_session_learning_rate(s) == -1 && whale_session_iteration(s) == -1 && whale_session_updates(s) == -1);
    whale_event_release(e);
    whale_session_release(s);
    whale_tensor_release(loss);
    whale_session* own = slow_session(); /* what the child opens is its own */
    loss = NULL, e = NULL;
    OK(slow_step(own, &loss, &e));
    OK(whale_event_wait(e, -1, &done));
    CHECK(whale_session_iteration(own) == 1);
    whale_event_release(e);
    whale_session_release(own);
    _exit(failures);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fprintf(stderr, "the child ended with %d\n", status);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  OK(whale_event_wait(e, -1, &done));
  whale_event_release(e);
  whale_tensor_release(loss);
  whale_session_release(s);
}

/* ---- events of planning, saving and loading; the log
 * -------------------------------------------------------------------------------- */
static int log_has(whale_engine* of, int32_t severity, const char* topic, const char* part) {
  whale_log* log = NULL;
  int found = 0;
  OK(whale_engine_drain_log(of, &log));
  for (size_t i = 0; i < whale_log_count(log); ++i) {
    whale_log_record r = WHALE_LOG_RECORD_INIT;
    char text[512];
    OK(whale_log_get(log, i, &r));
    snprintf(text, sizeof text, "%.*s", (int)r.message.size, r.message.data);
    found += r.severity == severity && same(r.topic, topic) && strstr(text, part) != NULL && r.nanoseconds > 0;
  }
  whale_log_record r = WHALE_LOG_RECORD_INIT;
  FAILS(whale_log_get(log, whale_log_count(log), &r), WHALE_INVALID_ARGUMENT, "`index`");
  whale_log_release(log);
  return found;
}

static void test_log(void) {
  whale_engine* own;
  whale_log* log = NULL;
  OK(whale_engine_create(NULL, &own));
  OK(whale_engine_drain_log(own, &log));
  CHECK(whale_log_count(log) == 0 && whale_log_dropped(log) == 0);
  whale_log_release(log);
  whale_graph* g = mlp();
  whale_cluster* c;
  whale_plan* p;
  OK(whale_cluster_create(own, WHALE_STR("ref:2"), &c));
  OK(whale_plan_create(own, g, c, NULL, &p));
  CHECK(log_has(own, WHALE_SEVERITY_INFO, "plan", "'mlp' is planned for 2 device(s)") == 1);
  CHECK(log_has(own, WHALE_SEVERITY_INFO, "plan", "'mlp' is planned") == 0); /* drained */
  whale_session* s;
  OK(whale_session_create(own, p, NULL, &s));
  CHECK(log_has(own, WHALE_SEVERITY_INFO, "session", "'mlp' runs on 2 device(s)") == 1);
  whale_session_release(s);
  whale_plan_release(p);
  /* More than are kept: the oldest go, and are counted. */
  size_t made = 0;
  for (int64_t dropped = 0; dropped == 0 && made < 1500; ++made) {
    OK(whale_plan_create(own, g, c, NULL, &p));
    whale_plan_release(p);
    if (made % 100 != 99) continue;
    for (int i = 0; i < 20; ++i) {
      OK(whale_plan_create(own, g, c, NULL, &p));
      whale_plan_release(p);
    }
    if (made < 1099) continue;
    OK(whale_engine_drain_log(own, &log));
    CHECK(whale_log_count(log) == 1000);
    dropped = whale_log_dropped(log);
    CHECK(dropped > 0);
    whale_log_release(log);
  }
  CHECK(made == 1100);
  OK(whale_engine_drain_log(own, &log));
  CHECK(whale_log_count(log) == 0 && whale_log_dropped(log) == 0);
  whale_log_release(log);
  whale_log_release(NULL);
  FAILS(whale_engine_drain_log(own, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  CHECK(whale_log_count(NULL) == 0 && whale_log_dropped(NULL) == 0);
  whale_cluster_release(c);
  whale_graph_release(g);
  whale_engine_release(own);
}

static void test_events(void) {
  whale_graph* g = mlp();
  whale_cluster* c;
  whale_plan* p = NULL;
  whale_event *e = NULL, *other = NULL, *none = NULL;
  whale_cancel* cancel = NULL;
  int32_t done = 0;
  int64_t index = -7;
  OK(whale_cluster_create(engine, WHALE_STR("ref:2"), &c));
  OK(whale_cancel_create(&cancel));
  /* Planning. */
  FAILS(whale_plan_create_async(engine, NULL, c, NULL, &e), WHALE_INVALID_ARGUMENT, "`graph` is NULL");
  FAILS(whale_plan_create_async(engine, g, c, NULL, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  whale_plan_options o = WHALE_PLAN_OPTIONS_INIT;
  o.precision = 9;
  FAILS(whale_plan_create_async(engine, g, c, &o, &e), WHALE_INVALID_ARGUMENT, "options.precision");
  o.precision = 0, o.timeout_seconds = -1;
  FAILS(whale_plan_create_async(engine, g, c, &o, &e), WHALE_INVALID_ARGUMENT, "number of seconds");
  o.timeout_seconds = 0;
  CHECK(e == NULL);
  char strategy[] = "replica(2)";
  o.strategy = str(strategy);
  o.cancel = cancel;
  OK(whale_plan_create_async(engine, g, c, &o, &e));
  memset(strategy, '?', sizeof strategy - 1); /* nothing of the caller's is looked at any more */
  OK(whale_event_wait(e, -1, &done));
  CHECK(done == 1);
  OK(whale_event_plan(e, &p));
  CHECK(whale_plan_device_count(p) == 2);
  whale_plan* twice = NULL;
  OK(whale_event_plan(e, &twice));
  whale_plan_release(twice);
  whale_event_release(e);
  e = NULL;
  /* What is wrong with the plan, and a cancelled one, are the event's errors. */
  o.strategy = WHALE_STR("replica(3)");
  OK(whale_plan_create_async(engine, g, c, &o, &e));
  FAILS(whale_event_wait(e, -1, &done), WHALE_INVALID_ARGUMENT, "replica");
  FAILS(whale_event_plan(e, &twice), WHALE_INVALID_ARGUMENT, "replica");
  whale_event_release(e);
  whale_cancel_trigger(cancel);
  o.strategy = WHALE_STR("");
  OK(whale_plan_create_async(engine, g, c, &o, &e));
  FAILS(whale_event_wait(e, -1, &done), WHALE_CANCELLED, "planning was cancelled");
  whale_event_release(e);
  whale_cancel_release(cancel);
  /* Released while it is under way. */
  OK(whale_plan_create_async(engine, g, c, NULL, &e));
  whale_cluster_release(c);
  whale_graph_release(g);
  whale_event_release(e);
  e = NULL;

  /* The first of several. */
  whale_session *s = slow_session(), *quick = NULL;
  whale_tensor *loss = NULL, *fetched = NULL;
  OK(whale_session_create(engine, p, NULL, &quick));
  whale_plan_release(p);
  FAILS(whale_event_wait_any(NULL, 0, -1, &index), WHALE_INVALID_ARGUMENT, "no event");
  FAILS(whale_event_wait_any(&none, 1, -1, &index), WHALE_INVALID_ARGUMENT, "no event");
  FAILS(whale_event_wait_any(NULL, 1, -1, &index), WHALE_INVALID_ARGUMENT, "`events` is NULL");
  CHECK(index == -7);
  for (int i = 0; i < 10; ++i) {
    OK(slow_step(s, &loss, &e));
    float x[BATCH][IN] = {{0}};
    const int64_t x_dims[] = {BATCH, IN};
    whale_tensor* in;
    int32_t input, output;
    OK(whale_session_input(quick, WHALE_STR("x"), &input));
    OK(whale_session_output(quick, WHALE_STR("logits"), &output));
    OK(whale_tensor_view(WHALE_F32, x_dims, 2, x, &in));
    OK(whale_session_eval(quick, &input, &in, 1, &output, &fetched, 1, NULL, &other));
    whale_event* const all[] = {NULL, e, other};
    OK(whale_event_wait_any(all, 3, 0, &index));
    CHECK(index >= -1 && index != 0 && (index == -1 || whale_event_query(all[index]) == 1));
    OK(whale_event_wait_any(all, 3, -1, &index));
    CHECK((index == 1 || index == 2) && whale_event_query(all[index]) == 1);
    CHECK(index == 1 || whale_event_query(e) == 0 || whale_event_query(other) == 1);
    FAILS(whale_event_plan(e, &twice), WHALE_FAILED_PRECONDITION, "not of whale_plan_create_async");
    OK(whale_event_wait(other, -1, &done));
    OK(whale_event_wait(e, -1, &done));
    OK(whale_event_wait_any(all, 3, -1, &index)); /* both: the first of the array */
    CHECK(index == 1);
    whale_event_release(e);
    whale_event_release(other);
    whale_tensor_release(in);
  }
  whale_tensor_release(fetched);
  whale_session_release(quick);

  /* Saving and loading. */
  char folder[] = "capi_test_XXXXXX", path[64], command[80];
  CHECK(mkdtemp(folder) != NULL);
  snprintf(path, sizeof path, "%s/step", folder);
  FAILS(whale_session_save_async(s, WHALE_STR(""), NULL, &e), WHALE_INVALID_ARGUMENT, "`directory` is empty");
  FAILS(whale_session_save_async(s, str(path), NULL, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_session_load_async(NULL, str(path), NULL, &e), WHALE_INVALID_ARGUMENT, "`session` is NULL");
  OK(whale_session_load_async(s, str(path), NULL, &e));
  FAILS(whale_event_wait(e, -1, &done), WHALE_NOT_FOUND, path);
  CHECK(done == 1 && whale_session_iteration(s) == 10);
  whale_event_release(e);
  (void)log_has(engine, 0, "", ""); /* drained */
  int refused = 0;
  for (int i = 0; i < 20; ++i) {
    OK(whale_session_save_async(s, str(path), NULL, &e));
    other = NULL;
    whale_status* status = slow_step(s, &loss, &other);
    if (status != NULL) {
      CHECK(whale_status_code(status) == WHALE_FAILED_PRECONDITION && other == NULL);
      ++refused;
    } else {
      CHECK(whale_event_query(e) == 1); /* the save had ended */
      OK(whale_event_wait(other, -1, &done));
      whale_event_release(other);
    }
    whale_status_release(status);
    const int64_t iteration = whale_session_iteration(s); /* waits for the save */
    CHECK(iteration >= 10 && whale_event_query(e) == 1);
    OK(whale_event_wait(e, -1, &done));
    whale_event_release(e);
  }
  CHECK(refused > 0);
  CHECK(log_has(engine, WHALE_SEVERITY_INFO, "checkpoint", "saved 'slow' after") == 20);
  const int64_t before = whale_session_iteration(s);
  OK(whale_session_save(s, str(path)));
  OK(slow_step(s, &loss, &e));
  OK(whale_event_wait(e, -1, &done));
  whale_event_release(e);
  OK(whale_cancel_create(&cancel));
  whale_cancel_trigger(cancel);
  OK(whale_session_save_async(s, str(path), cancel, &e));
  FAILS(whale_event_wait(e, -1, &done), WHALE_CANCELLED, "saving was cancelled");
  whale_event_release(e);
  OK(whale_session_load_async(s, str(path), cancel, &e));
  FAILS(whale_event_wait(e, -1, &done), WHALE_CANCELLED, "loading was cancelled");
  whale_event_release(e);
  CHECK(whale_session_iteration(s) == before + 1);
  OK(whale_session_load_async(s, str(path), NULL, &e)); /* the previous checkpoint */
  OK(whale_event_wait(e, -1, &done));
  whale_event_release(e);
  CHECK(whale_session_iteration(s) == before);
  CHECK(log_has(engine, WHALE_SEVERITY_INFO, "checkpoint", "loaded 'slow' after") == 1);
  OK(whale_session_save_async(s, str(path), NULL, &e));
  whale_session_release(s); /* waits for it */
  CHECK(whale_event_query(e) == 1);
  OK(whale_event_wait(e, -1, &done));
  whale_event_release(e);
  whale_cancel_release(cancel);
  whale_tensor_release(loss);
  snprintf(command, sizeof command, "rm -r %s", folder);
  CHECK(system(command) == 0);
}

/* ---- entries of other batch sizes
 * -------------------------------------------------------------------------------------------------------------------
 */
/* Of the first n samples: the loss, or -1 with the status. */
enum { LARGEST = 20 };
static float run_of(whale_session* s, int32_t run, int64_t n, whale_cancel* cancel, whale_status** status) {
  static float x[LARGEST * IN];
  static int32_t y[LARGEST];
  for (int i = 0; i < LARGEST * IN; ++i) x[i] = (float)sin(i);
  for (int i = 0; i < LARGEST; ++i) y[i] = i % OUT;
  const int64_t x_dims[] = {n, IN}, y_dims[] = {n};
  const int32_t inputs[] = {0, 1};
  int32_t output, done = 0;
  whale_tensor *in[2], *loss = NULL;
  whale_event* e = NULL;
  OK(whale_tensor_view(WHALE_F32, x_dims, 2, x, &in[0]));
  OK(whale_tensor_view(WHALE_I32, y_dims, 1, y, &in[1]));
  OK(whale_session_output(s, WHALE_STR("loss"), &output));
  whale_status* found = (run == WHALE_RUN_STEP ? whale_session_step : whale_session_eval)(s, inputs, in, 2, &output,
                                                                                          &loss, 1, cancel, &e);
  if (found == NULL) {
    found = whale_event_wait(e, -1, &done);
    whale_event_release(e);
  }
  const float value = found == NULL ? *(float*)whale_tensor_data(loss) : -1;
  whale_tensor_release(loss), whale_tensor_release(in[0]), whale_tensor_release(in[1]);
  if (status != NULL)
    *status = found;
  else
    OK(found);
  return value;
}

static void test_entries(void) {
  static const struct {
    int32_t run;
    int64_t batch;
  } asked[] = {
      {WHALE_RUN_STEP, BATCH}, {WHALE_RUN_EVAL, BATCH}, {WHALE_RUN_STEP, 3}, {WHALE_RUN_EVAL, 5}, {WHALE_RUN_EVAL, 11}};
  const int64_t train[] = {3, BATCH, 3}, eval[] = {5, 11}, many[] = {BATCH + 1}, none[] = {0};
  whale_graph* g = mlp();
  whale_cluster* c;
  whale_plan *made = NULL, *p = NULL;
  whale_text text = {NULL, 0};
  whale_plan_options o = WHALE_PLAN_OPTIONS_INIT;
  OK(whale_cluster_create(engine, WHALE_STR("ref:2"), &c));
  o.train_batch_count = 1;
  FAILS(whale_plan_create(engine, g, c, &o, &made), WHALE_INVALID_ARGUMENT, "`options.train_batches` is NULL");
  o.train_batches = many;
  FAILS(whale_plan_create(engine, g, c, &o, &made), WHALE_INVALID_ARGUMENT,
        "argument `options.train_batches` asks for 9 samples, and 'mlp' is trained with at most 8");
  FAILS(whale_plan_estimate(engine, g, c, &o, &text), WHALE_INVALID_ARGUMENT,
        "argument `options.train_batches` asks for 9 samples, and 'mlp' is trained with at most 8");
  o.train_batches = none;
  FAILS(whale_plan_create(engine, g, c, &o, &made), WHALE_INVALID_ARGUMENT, "options.train_batches");
  o.train_batches = train, o.train_batch_count = 3;
  o.eval_batches = none, o.eval_batch_count = 1;
  FAILS(whale_plan_create(engine, g, c, &o, &made), WHALE_INVALID_ARGUMENT, "options.eval_batches");
  o.eval_batches = eval, o.eval_batch_count = 2;
  CHECK(made == NULL);
  OK(whale_plan_create(engine, g, c, &o, &made));
  whale_bytes bytes = {NULL, 0};
  OK(whale_plan_serialize(made, &bytes));
  OK(whale_plan_parse(engine, bytes.data, bytes.size, &p)); /* a plan file has them */
  whale_bytes_release(&bytes);
  whale_plan_release(made);
  whale_entry entry = WHALE_ENTRY_INIT;
  CHECK(whale_plan_entry_count(p) == 5 && whale_plan_entry_count(NULL) == 0);
  for (size_t i = 0; i < 5; ++i) {
    OK(whale_plan_entry(p, i, &entry));
    CHECK(entry.run == asked[i].run && entry.batch == asked[i].batch && entry.planned_here == 0);
  }
  FAILS(whale_plan_entry(p, 5, &entry), WHALE_INVALID_ARGUMENT, "`index` is 5; the plan has 5 entries");
  FAILS(whale_plan_entry(p, 0, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");

  whale_session *s = NULL, *free_one = NULL;
  whale_session_options so = WHALE_SESSION_OPTIONS_INIT;
  whale_status* status = NULL;
  so.seed = 3, so.plan_in_run = 2;
  FAILS(whale_session_create(engine, p, &so, &s), WHALE_INVALID_ARGUMENT, "options.plan_in_run");
  so.plan_in_run = 0;
  OK(whale_session_create(engine, p, &so, &s));
  so.plan_in_run = 1;
  OK(whale_session_create(engine, p, &so, &free_one));
  whale_plan_release(p), whale_cluster_release(c), whale_graph_release(g);
  /* All that the plan has is there before any run, and runs of these sizes add nothing. */
  (void)log_has(engine, 0, "", ""); /* drained */
  CHECK(whale_session_entry_count(s) == 5 && whale_session_entry_count(NULL) == 0);
  for (size_t i = 0; i < 5; ++i) CHECK(run_of(s, asked[i].run, asked[i].batch, NULL, NULL) > 0);
  CHECK(whale_session_entry_count(s) == 5 && log_has(engine, WHALE_SEVERITY_INFO, "plan", "is planned for") == 0);
  /* Nobody asked for these: refused, with what there is, and the session is as before. */
  (void)run_of(s, WHALE_RUN_STEP, 2, NULL, &status);
  FAILS(status, WHALE_FAILED_PRECONDITION, "'mlp' has no entry 'train' of 2 samples");
  (void)run_of(s, WHALE_RUN_EVAL, 3, NULL, &status);
  FAILS(status, WHALE_FAILED_PRECONDITION, "it has train of 8, eval of 8, train of 3, eval of 5, eval of 11");
  CHECK(whale_session_entry_count(s) == 5 && whale_session_iteration(s) == 2);
  /* Ahead of the run. */
  FAILS(whale_session_prepare(NULL, WHALE_RUN_STEP, 2, NULL), WHALE_INVALID_ARGUMENT, "`session` is NULL");
  FAILS(whale_session_prepare(s, 2, 2, NULL), WHALE_INVALID_ARGUMENT, "`run` is 2");
  FAILS(whale_session_prepare(s, WHALE_RUN_STEP, 0, NULL), WHALE_INVALID_ARGUMENT, "`batch` is 0");
  FAILS(whale_session_prepare(s, WHALE_RUN_STEP, 9, NULL), WHALE_INVALID_ARGUMENT, "this plan is for at most 8");
  whale_cancel* cancel = NULL;
  OK(whale_cancel_create(&cancel));
  whale_cancel_trigger(cancel);
  FAILS(whale_session_prepare(s, WHALE_RUN_STEP, 2, cancel), WHALE_CANCELLED, "planning for this batch was cancelled");
  CHECK(whale_session_entry_count(s) == 5);
  for (int twice = 0; twice < 2; ++twice) OK(whale_session_prepare(s, WHALE_RUN_STEP, 2, NULL));
  OK(whale_session_prepare(s, WHALE_RUN_EVAL, 3, NULL));
  CHECK(log_has(engine, WHALE_SEVERITY_INFO, "plan", "samples, ahead of it") == 2);
  CHECK(whale_session_entry_count(s) == 7);
  OK(whale_session_entry(s, 5, &entry));
  CHECK(entry.run == WHALE_RUN_STEP && entry.batch == 2 && entry.planned_here == 1);
  OK(whale_session_entry(s, 4, &entry));
  CHECK(entry.run == WHALE_RUN_EVAL && entry.batch == 11 && entry.planned_here == 0);
  FAILS(whale_session_entry(s, 7, &entry), WHALE_INVALID_ARGUMENT, "`index` is 7; the session has 7 entries");
  const float ahead = run_of(s, WHALE_RUN_STEP, 2, NULL, NULL);
  (void)run_of(s, WHALE_RUN_EVAL, 3, NULL, NULL);
  CHECK(whale_session_entry_count(s) == 7 && log_has(engine, WHALE_SEVERITY_INFO, "plan", "is planned for") == 0);
  /* A session that may plan in a run does, and counts it; the bits are the same. */
  CHECK(run_of(free_one, WHALE_RUN_STEP, BATCH, NULL, NULL) > 0 && run_of(free_one, WHALE_RUN_STEP, 3, NULL, NULL) > 0);
  CHECK(whale_session_entry_count(free_one) == 5);
  (void)run_of(free_one, WHALE_RUN_STEP, 2, cancel, &status);
  FAILS(status, WHALE_CANCELLED, "planning for this batch was cancelled");
  CHECK(run_of(free_one, WHALE_RUN_STEP, 2, NULL, NULL) == ahead && whale_session_entry_count(free_one) == 6);
  CHECK(log_has(engine, WHALE_SEVERITY_INFO, "plan", "'mlp' is planned for a step of 2 samples, in the run") == 1);
  /* Of those that runs planned the oldest goes; what was prepared stays. */
  OK(whale_session_prepare(free_one, WHALE_RUN_STEP, 2, NULL));
  for (int64_t n = 1; n <= LARGEST; ++n) (void)run_of(free_one, WHALE_RUN_EVAL, n, NULL, NULL);
  CHECK(whale_session_entry_count(free_one) == 5 + 1 + 16);
  OK(whale_session_entry(free_one, 5, &entry));
  CHECK(entry.run == WHALE_RUN_STEP && entry.batch == 2);
  OK(whale_session_entry(free_one, 6, &entry));
  CHECK(entry.run == WHALE_RUN_EVAL && entry.batch == 2); /* that of 1 is gone */
  whale_cancel_release(cancel);
  whale_session_release(s), whale_session_release(free_one);
}

/* ---- worlds
 * -------------------------------------------------------------------------------------------------------------------
 */
typedef struct {
  const whale_plan* plan;
  whale_world* world;   /* NULL: alone */
  whale_status* opened; /* of whale_session_create */
  uint64_t seed;
  float losses[3], logits[BATCH * OUT], w1[IN * HIDDEN];
  size_t w1_here;
  whale_status* ended; /* of a step that this rank cancels, where `cancels` */
  int cancels;
  int slices; /* 1: the steps are given what this rank reads alone */
} Rank;

/* What this rank reads of an input whose samples come first, one box behind the other. `size`: of a sample. */
static whale_tensor* slices_of(whale_session* s, int32_t input, const char* data, size_t size) {
  whale_port port = WHALE_PORT_INIT;
  whale_tensor* out;
  size_t count = 0, at = 0;
  OK(whale_session_input_port(s, input, &port));
  OK(whale_session_slice_count(s, WHALE_RUN_STEP, 0, input, &count));
  CHECK(count <= 2 && port.rank <= 2);
  int64_t begin[2][2], end[2][2], dims[2] = {0, port.dims[port.rank - 1]};
  if (port.rank == 1) dims[0] = 0;
  for (size_t i = 0; i < count; ++i) {
    OK(whale_session_slice(s, WHALE_RUN_STEP, BATCH, input, i, begin[i], end[i]));
    CHECK(port.rank == 1 || (begin[i][1] == 0 && end[i][1] == port.dims[1]));
    dims[0] += end[i][0] - begin[i][0];
  }
  OK(whale_tensor_create(port.dtype, dims, port.rank, &out));
  for (size_t i = 0; i < count; ++i) {
    const size_t bytes = (size_t)(end[i][0] - begin[i][0]) * size;
    memcpy((char*)whale_tensor_data(out) + at, data + (size_t)begin[i][0] * size, bytes);
    at += bytes;
  }
  return out;
}

/* What a rank's thread does: its own engine, a session, steps, reads. */
static void* run_rank(void* argument) {
  Rank* rank = argument;
  whale_engine* own;
  whale_session* s;
  whale_session_options options = WHALE_SESSION_OPTIONS_INIT;
  options.seed = rank->seed, options.world = rank->world;
  OK(whale_engine_create(NULL, &own));
  rank->opened = whale_session_create(own, rank->plan, &options, &s);
  if (rank->opened == NULL) {
    float x_data[BATCH * IN];
    int32_t y_data[BATCH], done = 0;
    const int64_t x_dims[] = {BATCH, IN}, y_dims[] = {BATCH}, w1_dims[] = {IN, HIDDEN};
    for (int i = 0; i < BATCH * IN; ++i) x_data[i] = (float)sin(i);
    for (int i = 0; i < BATCH; ++i) y_data[i] = i % OUT;
    whale_tensor *fed[2], *whole;
    OK(whale_tensor_view(WHALE_F32, x_dims, 2, x_data, &fed[0]));
    OK(whale_tensor_view(WHALE_I32, y_dims, 1, y_data, &fed[1]));
    int32_t inputs[2], outputs[2];
    OK(whale_session_input(s, WHALE_STR("x"), &inputs[0]));
    OK(whale_session_input(s, WHALE_STR("y"), &inputs[1]));
    OK(whale_session_output(s, WHALE_STR("loss"), &outputs[0]));
    OK(whale_session_output(s, WHALE_STR("logits"), &outputs[1]));
    whale_event* e;
    whale_tensor* part[2] = {NULL, NULL};
    if (rank->slices) {
      part[0] = slices_of(s, inputs[0], (const char*)x_data, sizeof(float) * IN);
      part[1] = slices_of(s, inputs[1], (const char*)y_data, sizeof(int32_t));
    }
    for (int step = 0; step < 3; ++step) {
      whale_tensor* got[2] = {NULL, NULL};
      if (rank->slices)
        OK(whale_session_run_slices(s, WHALE_RUN_STEP, step % 2 == 0 ? 0 : BATCH, inputs, part, 2, outputs, got, 2,
                                    NULL, &e));
      else
        OK(whale_session_step(s, inputs, fed, 2, outputs, got, 2, NULL, &e));
      OK(whale_event_wait(e, -1, &done));
      whale_event_release(e);
      rank->losses[step] = *(const float*)whale_tensor_data(got[0]);
      memcpy(rank->logits, whale_tensor_data(got[1]), sizeof rank->logits);
      whale_tensor_release(got[0]), whale_tensor_release(got[1]);
    }
    whale_cancel* cancel = NULL;
    OK(whale_cancel_create(&cancel));
    if (rank->cancels) whale_cancel_trigger(cancel);
    OK(whale_session_step(s, inputs, fed, 2, NULL, NULL, 0, cancel, &e));
    rank->ended = whale_event_wait(e, 60, &done);
    CHECK(done == 1);
    whale_event_release(e);
    whale_cancel_release(cancel);
    OK(whale_session_read(s, WHALE_STR("body.w1"), &whole));
    memcpy(rank->w1, whale_tensor_data(whole), sizeof rank->w1);
    memset(whale_tensor_data(whole), 0x55, sizeof rank->w1);
    OK(whale_session_read_here(s, WHALE_STR("body.w1"), 0, whole, &rank->w1_here));
    CHECK(rank->w1_here > 0 || ((char*)whale_tensor_data(whole))[0] == 0x55);
    whale_tensor_release(whole);
    OK(whale_tensor_create(WHALE_F64, w1_dims, 2, &whole));
    FAILS(whale_session_read_here(s, WHALE_STR("body.w1"), 0, whole, NULL), WHALE_INVALID_ARGUMENT, "the tensor given");
    whale_tensor_release(whole);
    whale_tensor_release(fed[0]), whale_tensor_release(fed[1]);
    whale_tensor_release(part[0]), whale_tensor_release(part[1]);
    whale_session_release(s);
  }
  whale_engine_release(own);
  return NULL;
}

static void run_ranks(Rank* ranks, int count) {
  pthread_t threads[2];
  for (int r = 0; r < count; ++r) CHECK(pthread_create(&threads[r], NULL, run_rank, &ranks[r]) == 0);
  for (int r = 0; r < count; ++r) CHECK(pthread_join(threads[r], NULL) == 0);
}

static whale_plan* plan_for(const char* devices, const char* strategy) {
  whale_graph* g = mlp();
  whale_cluster* cluster;
  whale_plan* plan;
  whale_plan_options options = WHALE_PLAN_OPTIONS_INIT;
  options.strategy = str(strategy);
  OK(whale_cluster_create(engine, str(devices), &cluster));
  OK(whale_plan_create(engine, g, cluster, &options, &plan));
  whale_cluster_release(cluster);
  whale_graph_release(g);
  return plan;
}

/* Of a session without a world everything is read. */
static void test_slices(void) {
  whale_plan* plan = plan_for("ref:2", "");
  whale_session* s;
  whale_event* e = NULL;
  size_t count = 7;
  int64_t begin[2] = {-1, -1}, end[2] = {-1, -1};
  const int64_t dims[] = {BATCH - 1, IN};
  int32_t x, y;
  OK(whale_session_create(engine, plan, NULL, &s));
  OK(whale_session_input(s, WHALE_STR("x"), &x));
  OK(whale_session_input(s, WHALE_STR("y"), &y));
  FAILS(whale_session_slice_count(NULL, WHALE_RUN_STEP, 0, x, &count), WHALE_INVALID_ARGUMENT, "`session` is NULL");
  FAILS(whale_session_slice_count(s, WHALE_RUN_STEP, 0, x, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_session_slice_count(s, 2, 0, x, &count), WHALE_INVALID_ARGUMENT, "`run` is 2");
  FAILS(whale_session_slice_count(s, WHALE_RUN_STEP, -1, x, &count), WHALE_INVALID_ARGUMENT, "`batch` is -1");
  FAILS(whale_session_slice_count(s, WHALE_RUN_STEP, 0, 9, &count), WHALE_INVALID_ARGUMENT, "there is no input 9");
  FAILS(whale_session_slice_count(s, WHALE_RUN_STEP, BATCH - 1, x, &count), WHALE_FAILED_PRECONDITION,
        "plans none in a run");
  CHECK(count == 7);
  OK(whale_session_slice_count(s, WHALE_RUN_STEP, BATCH, x, &count));
  CHECK(count == 1);
  FAILS(whale_session_slice(s, WHALE_RUN_STEP, 0, x, 1, begin, end), WHALE_INVALID_ARGUMENT,
        "`index` is 1; this rank has 1 slices");
  FAILS(whale_session_slice(s, WHALE_RUN_STEP, 0, x, 0, NULL, end), WHALE_INVALID_ARGUMENT, "`begin` is NULL");
  FAILS(whale_session_slice(s, WHALE_RUN_STEP, 0, x, 0, begin, NULL), WHALE_INVALID_ARGUMENT, "`end` is NULL");
  CHECK(begin[0] == -1 && end[0] == -1);
  OK(whale_session_slice(s, WHALE_RUN_STEP, 0, x, 0, begin, end));
  CHECK(begin[0] == 0 && end[0] == BATCH && begin[1] == 0 && end[1] == IN);
  whale_tensor* less;
  OK(whale_tensor_create(WHALE_F32, dims, 2, &less));
  FAILS(whale_session_run_slices(s, 2, 0, &x, &less, 1, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT, "`run` is 2");
  FAILS(whale_session_run_slices(s, WHALE_RUN_STEP, -1, &x, &less, 1, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT,
        "`batch` is -1");
  FAILS(whale_session_run_slices(s, WHALE_RUN_STEP, 0, &x, &less, 1, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT,
        "the slices of rank 0 of input 'x' are f32");
  FAILS(whale_session_run_slices(s, WHALE_RUN_STEP, 0, &x, NULL, 0, NULL, NULL, 0, NULL, &e), WHALE_INVALID_ARGUMENT,
        "are missing");
  CHECK(e == NULL && whale_session_iteration(s) == 0);
  whale_tensor_release(less);
  whale_session_release(s);
  whale_plan_release(plan);
}

/* Without other ranks there is nobody to tell; what is wrong with the call is said all the same. */
static void test_refuse(void) {
  whale_plan* plan = plan_for("ref:2", "");
  whale_session* s;
  OK(whale_session_create(engine, plan, NULL, &s));
  OK(whale_session_refuse(s, WHALE_ABORTED, WHALE_STR("no data")));
  FAILS(whale_session_refuse(NULL, WHALE_ABORTED, WHALE_STR("no data")), WHALE_INVALID_ARGUMENT, "`session` is NULL");
  FAILS(whale_session_refuse(s, WHALE_OK, WHALE_STR("no data")), WHALE_INVALID_ARGUMENT, "`code` is 0");
  FAILS(whale_session_refuse(s, 99, WHALE_STR("no data")), WHALE_INVALID_ARGUMENT, "`code` is 99");
  OK(whale_session_same(s, 7));
  FAILS(whale_session_same(NULL, 7), WHALE_INVALID_ARGUMENT, "`session` is NULL");
  CHECK(whale_session_iteration(s) == 0);
  whale_session_release(s);
  whale_plan_release(plan);
}

static void test_probe(void) {
  whale_cluster *two, *null;
  whale_text text = {0};
  whale_cancel* cancel;
  OK(whale_cluster_create(engine, WHALE_STR("ref:2"), &two));
  OK(whale_cluster_create(engine, WHALE_STR("null:2"), &null));
  OK(whale_cancel_create(&cancel));
  FAILS(whale_engine_probe_json(NULL, two, NULL, NULL, &text), WHALE_INVALID_ARGUMENT, "`engine` is NULL");
  FAILS(whale_engine_probe_json(engine, NULL, NULL, NULL, &text), WHALE_INVALID_ARGUMENT, "`cluster` is NULL");
  FAILS(whale_engine_probe_json(engine, two, NULL, NULL, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_engine_probe_json(engine, null, NULL, NULL, &text), WHALE_UNIMPLEMENTED, "null devices are not probed");
  whale_cancel_trigger(cancel);
  FAILS(whale_engine_probe_json(engine, two, NULL, cancel, &text), WHALE_CANCELLED, "probing was cancelled");
  CHECK(text.data == NULL);
  OK(whale_engine_probe_json(engine, two, NULL, NULL, &text));
  CHECK(text.size > 2 && strstr(text.data, "\"profile\":{\"device.flops_per_second\":") != NULL);

  whale_graph* graph = mlp();
  whale_plan_options options = WHALE_PLAN_OPTIONS_INIT;
  whale_plan* plan = NULL;
  options.profile = WHALE_STR("{\"link.bytes\": 1}");
  FAILS(whale_plan_create(engine, graph, two, &options, &plan), WHALE_INVALID_ARGUMENT, "no figure 'link.bytes'");
  options.profile.data = NULL;
  FAILS(whale_plan_create(engine, graph, two, &options, &plan), WHALE_INVALID_ARGUMENT, "null pointer");
  options.profile.data = text.data, options.profile.size = text.size;
  OK(whale_plan_create(engine, graph, two, &options, &plan));
  whale_plan_release(plan);

  whale_text profile = {0};
  const int64_t batch = 2, none = 0, many = 1000;
  FAILS(whale_engine_profile_json(NULL, graph, two, NULL, NULL, 0, 0, &profile), WHALE_INVALID_ARGUMENT, "`engine` is NULL");
  FAILS(whale_engine_profile_json(engine, NULL, two, NULL, NULL, 0, 0, &profile), WHALE_INVALID_ARGUMENT, "`graph` is NULL");
  FAILS(whale_engine_profile_json(engine, graph, two, NULL, NULL, 0, 0, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  FAILS(whale_engine_profile_json(engine, graph, two, NULL, NULL, 1, 0, &profile), WHALE_INVALID_ARGUMENT, "`samples`");
  FAILS(whale_engine_profile_json(engine, graph, two, NULL, &none, 1, 0, &profile), WHALE_INVALID_ARGUMENT, "`samples`");
  FAILS(whale_engine_profile_json(engine, graph, two, NULL, &many, 1, 0, &profile), WHALE_INVALID_ARGUMENT, "a local batch of 1000");
  FAILS(whale_engine_profile_json(engine, graph, two, NULL, &batch, 1, -1, &profile), WHALE_INVALID_ARGUMENT, "`seconds` is -1");
  FAILS(whale_engine_profile_json(engine, graph, null, NULL, &batch, 1, 0, &profile), WHALE_UNIMPLEMENTED, "null devices are not profiled");
  FAILS(whale_engine_profile_import_json(engine, WHALE_STR("/nowhere"), WHALE_STR(""), &profile), WHALE_NOT_FOUND, "/nowhere");
  CHECK(profile.data == NULL);
  OK(whale_engine_profile_json(engine, graph, two, NULL, &batch, 1, 0.01, &profile));
  CHECK(profile.size > 2 && strstr(profile.data, "\"schema\":\"whale.profile/1\"") != NULL);
  options.profile.data = profile.data, options.profile.size = profile.size;
  OK(whale_plan_create(engine, graph, two, &options, &plan));
  whale_plan_release(plan);
  whale_text_release(&profile);
  whale_graph_release(graph);
  whale_text_release(&text);
  whale_cancel_release(cancel);
  whale_cluster_release(two);
  whale_cluster_release(null);
}

static void test_worlds(void) {
  whale_world *worlds[2] = {NULL, NULL}, *untouched = NULL;
  FAILS(whale_world_create_inproc(0, &untouched), WHALE_INVALID_ARGUMENT, "`ranks`");
  FAILS(whale_world_create_inproc(2, NULL), WHALE_INVALID_ARGUMENT, "`out` is NULL");
  CHECK(untouched == NULL && whale_world_rank(NULL) == -1 && whale_world_size(NULL) == 0);
  whale_world_release(NULL);
  OK(whale_world_create_inproc(2, worlds));
  CHECK(whale_world_rank(worlds[0]) == 0 && whale_world_rank(worlds[1]) == 1 && whale_world_size(worlds[1]) == 2);

  whale_plan *three = plan_for("ref:3", ""), *one = plan_for("ref:1", "");
  int32_t rank = -7;
  for (size_t d = 0; d < 3; ++d) {
    OK(whale_world_device_rank(worlds[1], three, d, &rank));
    CHECK(rank == (d < 2 ? 0 : 1));
  }
  rank = -7;
  FAILS(whale_world_device_rank(worlds[1], three, 3, &rank), WHALE_INVALID_ARGUMENT, "3 devices");
  FAILS(whale_world_device_rank(worlds[1], one, 0, &rank), WHALE_INVALID_ARGUMENT, "rank 1 of 2 has none");
  CHECK(rank == -7);

  /* As one process: whichever rank's devices hand an output over; each of the ranks cancels a step once. */
  const char* strategies[] = {"", "pipeline(2, micro_batches=2)"};
  for (int k = 0; k < 2; ++k) {
    whale_plan* plan = plan_for("ref:2", strategies[k]);
    Rank alone = {.plan = plan, .seed = 3, .cancels = 1};
    run_rank(&alone);
    OK(alone.opened);
    FAILS(alone.ended, WHALE_CANCELLED, "");
    for (int canceller = 0; canceller < 2; ++canceller) { /* a second session of the same worlds too */
      Rank both[2] = {{.plan = plan, .world = worlds[0], .seed = 3}, {.plan = plan, .world = worlds[1], .seed = 3}};
      both[canceller].cancels = 1;
      run_ranks(both, 2);
      for (int r = 0; r < 2; ++r) {
        OK(both[r].opened);
        CHECK(both[r].ended != NULL && whale_status_damage(both[r].ended) == WHALE_DAMAGE_STEP);
        CHECK(r == canceller || whale_status_rank(both[r].ended) == canceller);
        FAILS(both[r].ended, WHALE_CANCELLED, r == canceller ? "" : canceller == 0 ? "rank 0: " : "rank 1: ");
        CHECK(memcmp(both[r].losses, alone.losses, sizeof alone.losses) == 0);
        CHECK(memcmp(both[r].logits, alone.logits, sizeof alone.logits) == 0);
        CHECK(memcmp(both[r].w1, alone.w1, sizeof alone.w1) == 0);
      }
      CHECK(both[0].w1_here > 0 && both[0].w1_here + both[1].w1_here == sizeof alone.w1);
    }
    /* Each rank is given what it reads, or one of them all of it. */
    for (int whole = -1; whole < 2; ++whole) {
      Rank both[2] = {{.plan = plan, .world = worlds[0], .seed = 3, .cancels = 1},
                      {.plan = plan, .world = worlds[1], .seed = 3, .cancels = 1}};
      for (int r = 0; r < 2; ++r) both[r].slices = r != whole;
      run_ranks(both, 2);
      for (int r = 0; r < 2; ++r) {
        OK(both[r].opened);
        FAILS(both[r].ended, WHALE_CANCELLED, "");
        CHECK(memcmp(both[r].losses, alone.losses, sizeof alone.losses) == 0);
        CHECK(memcmp(both[r].logits, alone.logits, sizeof alone.logits) == 0);
        CHECK(memcmp(both[r].w1, alone.w1, sizeof alone.w1) == 0);
      }
    }
    whale_plan_release(plan);
  }

  /* What is not the same, or is refused by one rank, fails on both, and the world goes on. */
  whale_plan* two = plan_for("ref:2", "");
  Rank unlike[2] = {{.plan = two, .world = worlds[0], .seed = 3}, {.plan = two, .world = worlds[1], .seed = 4}};
  run_ranks(unlike, 2);
  for (int r = 0; r < 2; ++r) {
    CHECK(unlike[r].opened != NULL && whale_status_rank(unlike[r].opened) == 1);
    FAILS(unlike[r].opened, WHALE_FAILED_PRECONDITION, "rank 0 has 'seed 3', rank 1 has 'seed 4'");
  }
  Rank fewer[2] = {{.plan = two, .world = worlds[0]}, {.plan = one, .world = worlds[1]}};
  run_ranks(fewer, 2);
  FAILS(fewer[0].opened, WHALE_FAILED_PRECONDITION, "rank 1 opens no session: rank 1 of 2 has none");
  FAILS(fewer[1].opened, WHALE_INVALID_ARGUMENT, "has none of the plan's 1 device: launch at most 1 rank");
  Rank again[2] = {{.plan = two, .world = worlds[0], .cancels = 1}, {.plan = two, .world = worlds[1], .cancels = 1}};
  run_ranks(again, 2);
  for (int r = 0; r < 2; ++r) {
    OK(again[r].opened);
    FAILS(again[r].ended, WHALE_CANCELLED, "");
  }
  whale_world_release(worlds[0]), whale_world_release(worlds[1]);
  OK(whale_world_create_inproc(1, worlds)); /* of one: as without */
  Rank single = {.plan = two, .world = worlds[0]};
  run_ranks(&single, 1);
  OK(single.opened), OK(single.ended);
  CHECK(single.losses[0] == again[0].losses[0] && single.w1_here == sizeof single.w1);
  whale_world_release(worlds[0]);
  whale_plan_release(one), whale_plan_release(two), whale_plan_release(three);
}

int main(void) {
  OK(whale_engine_create(NULL, &engine));
  test_version();
  test_engine();
  test_defaults();
  test_tensors();
  test_graph();
  test_graph_errors();
  test_scopes();
  test_data_and_groups();
  test_gradients();
  test_cluster();
  test_plan();
  test_session("ref:2");
  test_session("ref:1");
  test_busy();
  test_fork();
  test_log();
  test_events();
  test_entries();
  test_slices();
  test_refuse();
  test_probe();
  test_worlds();
  whale_engine_release(engine);
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures > 0;
}
