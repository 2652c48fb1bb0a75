/* A host of the library that is peculiar: rounding modes, traps, limits, cores. Prints what came of it; test_host.py says what should.
 *
 *   host train MODE DEVICES PRECISION    digests of losses and variables; MODE: plain upward downward zero flush traps
 *   host threads DEVICES                 with ever more threads permitted: the code of each session until one opens and works
 *   host addresses DEVICES PRECISION MIB a session and a step with so many MiB of addresses more than there are
 *   host cores                           cores of the threads of one session of one core, of a second, of an unpinned one
 */
#include <dirent.h>
#include <errno.h>
#include <fenv.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <whale/whale.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

static unsigned control(void) {
#if defined(__x86_64__)
  return _mm_getcsr();
#else
  return (unsigned)fegetround() | (unsigned)fegetexcept() << 16;
#endif
}

/* The call succeeds, and the floating-point environment is after it what it was before, flags included. */
#define OK(call)                                                    \
  do {                                                              \
    const unsigned before_ = control();                             \
    whale_status* status_ = (call);                                 \
    const unsigned after_ = control();                              \
    if (before_ != after_) {                                        \
      printf("%s: environment %x -> %x\n", #call, before_, after_); \
      exit(3);                                                      \
    }                                                               \
    ok(status_, __LINE__);                                          \
  } while (0)
static void ok(whale_status* status, int line) {
  if (status == NULL) return;
  whale_str m = whale_status_message(status);
  printf("line %d: code %d: %.*s\n", line, whale_status_code(status), (int)m.size, m.data);
  exit(2);
}
static whale_str str(const char* text) {
  whale_str s = {text, strlen(text)};
  return s;
}

enum { BATCH = 32, IN = 24, HIDDEN = 48, OUT = 10 };
static whale_engine* engine;

static whale_value op(whale_graph* g, const char* name, const whale_value* in, size_t n) {
  whale_value out[3];
  size_t count = 0;
  OK(whale_graph_op(g, str(name), in, n, NULL, 0, NULL, out, 3, &count));
  return out[0];
}

static whale_graph* model(void) {
  const int64_t x_dims[] = {BATCH, IN}, y_dims[] = {BATCH}, w1_dims[] = {IN, HIDDEN}, g_dims[] = {HIDDEN},
                w2_dims[] = {HIDDEN, OUT};
  whale_graph* g;
  whale_value x, y, w1, gamma, w2, in[3];
  OK(whale_graph_create(engine, WHALE_STR("host"), &g));
  OK(whale_graph_input(g, WHALE_STR("x"), WHALE_F32, x_dims, 2, 0, &x));
  OK(whale_graph_input(g, WHALE_STR("y"), WHALE_I32, y_dims, 1, 0, &y));
  whale_parameter_options normal = WHALE_PARAMETER_OPTIONS_INIT;
  normal.init = WHALE_INIT_TRUNCATED_NORMAL;
  normal.b = 0.3;
  OK(whale_graph_parameter(g, WHALE_STR("w1"), WHALE_F32, w1_dims, 2, &normal, &w1));
  normal.init = WHALE_INIT_UNIFORM, normal.a = 0.5, normal.b = 1.5;
  OK(whale_graph_parameter(g, WHALE_STR("gamma"), WHALE_F32, g_dims, 1, &normal, &gamma));
  normal.init = WHALE_INIT_NORMAL, normal.a = 0, normal.b = 0.3;
  OK(whale_graph_parameter(g, WHALE_STR("w2"), WHALE_F32, w2_dims, 2, &normal, &w2));
  in[0] = x, in[1] = w1;
  whale_value h = op(g, "matmul", in, 2);
  h = op(g, "gelu_erf", &h, 1);
  in[0] = h, in[1] = gamma;
  h = op(g, "rms_norm", in, 2);
  in[0] = h, in[1] = w2;
  h = op(g, "matmul", in, 2);
  in[0] = h, in[1] = y;
  h = op(g, "cross_entropy", in, 2);
  h = op(g, "reduce_mean", &h, 1);
  whale_training_options t = WHALE_TRAINING_OPTIONS_INIT;
  t.optimizer = WHALE_OPTIMIZER_ADAMW;
  t.learning_rate = 0.01;
  t.weight_decay = 0.1;
  t.clip_norm = 0.7;
  t.lr_schedule = WHALE_LR_COSINE;
  t.total_steps = 7;
  OK(whale_graph_minimize(g, h, &t));
  OK(whale_graph_seal(g));
  return g;
}

static whale_plan* planned(const char* devices, int precision) {
  whale_graph* g = model();
  whale_cluster* c;
  whale_plan* p;
  whale_plan_options o = WHALE_PLAN_OPTIONS_INIT;
  o.precision = precision;
  o.accumulation = 2;
  OK(whale_cluster_create(engine, str(devices), &c));
  OK(whale_plan_create(engine, g, c, &o, &p));
  whale_cluster_release(c);
  whale_graph_release(g);
  return p;
}

static uint64_t digest(uint64_t h, const void* data, size_t size) {
  for (size_t i = 0; i < size; ++i) h = (h ^ ((const unsigned char*)data)[i]) * 1099511628211u;
  return h;
}

/* A step or an evaluation of the first `batch` samples; no arithmetic here: the host's traps are its own. */
static float inputs_x[BATCH][IN];
static double wide_x[BATCH][IN];
static int wide; /* precision f64 */
static int32_t inputs_y[BATCH];
static whale_status* tried(whale_session* s, int eval, int64_t batch, uint64_t* h) {
  const int64_t x_dims[] = {batch, IN}, y_dims[] = {batch};
  whale_tensor *in[2], *out[1] = {NULL};
  int32_t inputs[2], outputs[1];
  whale_event* e;
  int32_t done = 0;
  OK(whale_tensor_view(wide ? WHALE_F64 : WHALE_F32, x_dims, 2, wide ? (void*)wide_x : (void*)inputs_x, &in[0]));
  OK(whale_tensor_view(WHALE_I32, y_dims, 1, inputs_y, &in[1]));
  OK(whale_session_input(s, WHALE_STR("x"), &inputs[0]));
  OK(whale_session_input(s, WHALE_STR("y"), &inputs[1]));
  OK(whale_session_output(s, WHALE_STR("loss"), &outputs[0]));
  whale_status* status = (eval ? whale_session_eval : whale_session_step)(s, inputs, in, 2, outputs, out, 1, NULL, &e);
  if (status == NULL) {
    status = whale_event_wait(e, -1, &done);
    whale_event_release(e);
  }
  if (status == NULL) {
    *h = digest(*h, whale_tensor_data(out[0]), whale_tensor_bytes(out[0]));
    whale_tensor_release(out[0]);
  }
  for (int i = 0; i < 2; ++i) whale_tensor_release(in[i]);
  return status;
}
static uint64_t run(whale_session* s, int eval, int64_t batch, uint64_t h) {
  OK(tried(s, eval, batch, &h));
  return h;
}

static void fill_inputs(void) {
  for (int i = 0; i < BATCH; ++i) {
    inputs_y[i] = i % OUT;
    for (int j = 0; j < IN; ++j) inputs_x[i][j] = (float)((i * 7 + j * 13) % 31) / 31.0f - 0.5f;
  }
  inputs_x[3][5] = 1e-41f; /* a denormal */
  for (int i = 0; i < BATCH; ++i)
    for (int j = 0; j < IN; ++j) wide_x[i][j] = inputs_x[i][j];
}

static void set_mode(const char* mode) {
  if (strcmp(mode, "upward") == 0) fesetround(FE_UPWARD);
  if (strcmp(mode, "downward") == 0) fesetround(FE_DOWNWARD);
  if (strcmp(mode, "zero") == 0) fesetround(FE_TOWARDZERO);
#if defined(__x86_64__)
  if (strcmp(mode, "flush") == 0) _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
  if (strcmp(mode, "traps") == 0) feenableexcept(FE_ALL_EXCEPT);
}

static int train(const char* mode, const char* devices, int precision) {
  static const char* names[] = {"w1", "gamma", "w2", "w1/m", "w1/v"};
  uint64_t h = 1469598103934665603u;
  char folder[] = "/tmp/whale_host_XXXXXX";
  if (mkdtemp(folder) == NULL) return 1;
  fill_inputs();
  wide = precision == WHALE_PRECISION_F64;
  set_mode(mode);
  OK(whale_engine_create(NULL, &engine));
  whale_plan* p = planned(devices, precision);
  whale_session_options so = WHALE_SESSION_OPTIONS_INIT;
  so.seed = 5, so.plan_in_run = 1;
  whale_session* s;
  OK(whale_session_create(engine, p, &so, &s));
  for (int i = 0; i < 3; ++i) h = run(s, 0, BATCH, h);
  h = run(s, 0, 17, h);
  h = run(s, 1, 9, h);
  const unsigned before = control();
  const double rate = whale_session_learning_rate(s);
  if (control() != before) return 3;
  h = digest(h, &rate, sizeof rate);
  OK(whale_session_save(s, str(folder)));
  OK(whale_session_load(s, str(folder)));
  h = run(s, 0, BATCH, h);
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
    whale_tensor* t;
    OK(whale_session_read(s, str(names[i]), &t));
    h = digest(h, whale_tensor_data(t), whale_tensor_bytes(t));
    whale_tensor_release(t);
  }
  whale_text text = {NULL, 0};
  OK(whale_plan_summary(p, &text)); /* rounded figures are text too */
  h = digest(h, text.data, text.size);
  whale_text_release(&text);
  OK(whale_session_report_json(s, &text));
  whale_text_release(&text);
  whale_session_release(s);
  whale_plan_release(p);
  whale_engine_release(engine);
  printf("%016llx\n", (unsigned long long)h);
  fflush(stdout);
  char command[64] = "rm -rf ";
  strcat(command, folder);
  return system(command) != 0;
}

/* In a child that may have `limit` threads and then does all it can with them; its exit code. */
static int with_threads(whale_plan* p, int limit) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const struct rlimit r = {(rlim_t)limit, (rlim_t)limit};
    if (setrlimit(RLIMIT_NPROC, &r) != 0 || (geteuid() == 0 && setuid(65533) != 0)) _exit(100);
    whale_session* s = NULL;
    whale_session_options so = WHALE_SESSION_OPTIONS_INIT;
    whale_engine* own;
    so.plan_in_run = 1;
    OK(whale_engine_create(NULL, &own)); /* its back end is open already: the library stays loaded */
    whale_status* status = whale_session_create(own, p, &so, &s);
    if (status != NULL) _exit(whale_status_code(status));
    uint64_t h = 0;
    for (int i = 0; i < 3; ++i) h = run(s, i == 1, BATCH - 5 * i, h);
    whale_session_release(s);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int threads(const char* devices) {
  fill_inputs();
  OK(whale_engine_create(NULL, &engine));
  whale_text text = {NULL, 0};
  OK(whale_engine_devices(engine, &text));
  whale_text_release(&text);
  whale_plan* p = planned(devices, WHALE_PRECISION_F32);
  for (int limit = 1; limit < 64; ++limit) {
    const int code = with_threads(p, limit);
    printf("%d ", code);
    if (code == 0) break;
  }
  printf("\n");
  whale_plan_release(p);
  whale_engine_release(engine);
  return 0;
}

static int addresses(const char* devices, int precision, long mib) {
  fill_inputs();
  OK(whale_engine_create(NULL, &engine));
  whale_text text = {NULL, 0};
  OK(whale_engine_devices(engine, &text));
  whale_text_release(&text);
  whale_plan* p = planned(devices, precision);
  long pages = 0;
  FILE* f = fopen("/proc/self/statm", "r");
  if (f == NULL || fscanf(f, "%ld", &pages) != 1) return 1;
  fclose(f);
  const rlim_t bytes = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + ((rlim_t)mib << 20);
  const struct rlimit r = {bytes, bytes};
  if (setrlimit(RLIMIT_AS, &r) != 0) return 1;
  whale_session* s = NULL;
  whale_session_options so = WHALE_SESSION_OPTIONS_INIT;
  so.plan_in_run = 1;
  whale_status* status = whale_session_create(engine, p, &so, &s);
  if (status != NULL) {
    printf("code %d\n", whale_status_code(status));
    whale_status_release(status);
    return 0;
  }
  run(s, 0, BATCH, 0);
  uint64_t h = 0;
  status = tried(s, 1, 7, &h); /* a batch size that the session did not know of: kernels are made */
  run(s, 0, BATCH, 0);
  whale_session_release(s);
  if (status == NULL)
    printf("works\n");
  else
    printf("later code %d\n", whale_status_code(status));
  whale_status_release(status);
  return 0;
}

/* The cores of the thread, as bits; 0: it is gone. */
static unsigned long long cores_of(pid_t thread) {
  cpu_set_t set;
  unsigned long long bits = 0;
  if (sched_getaffinity(thread, sizeof set, &set) != 0) return 0;
  for (int c = 0; c < 64; ++c)
    if (CPU_ISSET((size_t)c, &set)) bits |= 1ull << c;
  return bits;
}

/* Cores of the threads that are there to stay and not in `known`, which they join. A thread that was joined is listed
 * for some time yet: what is gone a hundredth of a second later is none of the session's. */
static unsigned long long new_cores(pid_t* known, int* count) {
  unsigned long long bits = 0;
  const int first = *count;
  DIR* tasks = opendir("/proc/self/task");
  for (struct dirent* entry = readdir(tasks); entry != NULL; entry = readdir(tasks)) {
    const pid_t thread = (pid_t)atoi(entry->d_name);
    int old = thread == 0;
    for (int i = 0; i < *count; ++i) old = old || known[i] == thread;
    if (!old) known[(*count)++] = thread;
  }
  closedir(tasks);
  usleep(10000);
  for (int i = first; i < *count; ++i) bits |= cores_of(known[i]);
  return bits;
}

static int cores(void) {
  pid_t known[256];
  int count = 0;
  OK(whale_engine_create(NULL, &engine));
  whale_plan* p = planned("cpu:1", WHALE_PRECISION_F32);
  whale_session_options so = WHALE_SESSION_OPTIONS_INIT;
  so.threads = 1;
  whale_session *s[4];
  (void)new_cores(known, &count);
  for (int i = 0; i < 4; ++i) {
    if (i == 2) whale_session_release(s[0]); /* its core is free again */
    so.no_pin = i == 3;
    OK(whale_session_create(engine, p, &so, &s[i]));
    printf("%llx ", new_cores(known, &count));
  }
  printf("%llx\n", cores_of(0));
  for (int i = 1; i < 4; ++i) whale_session_release(s[i]);
  whale_plan_release(p);
  whale_engine_release(engine);
  return 0;
}

int main(int argc, char** argv) {
  if (argc == 5 && strcmp(argv[1], "train") == 0) return train(argv[2], argv[3], atoi(argv[4]));
  if (argc == 3 && strcmp(argv[1], "threads") == 0) return threads(argv[2]);
  if (argc == 5 && strcmp(argv[1], "addresses") == 0) return addresses(argv[2], atoi(argv[3]), atol(argv[4]));
  if (argc == 2 && strcmp(argv[1], "cores") == 0) return cores();
  fprintf(stderr, "usage: host train|threads|addresses|cores ...\n");
  return 64;
}
