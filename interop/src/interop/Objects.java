package interop;

import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonPrimitive;
import java.lang.reflect.Method;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;

/** The objects that clients have, and their methods. */
final class Objects {
  private static final Gson GSON = new Gson();

  private Objects() {}

  /** Returns the object that a description with a client, a kind and a name asks for, or one with members. */
  static Object find(Map<String, RedissonClient> clients, JsonObject description)
      throws ReflectiveOperationException {
    String kind = description.get("kind").getAsString();
    RedissonClient client = clients.get(description.get("client").getAsString());
    if (description.has("members")) {
      JsonArray members = description.getAsJsonArray("members");
      RLock[] locks = new RLock[members.size()];
      for (int i = 0; i < locks.length; i++) {
        locks[i] = (RLock) find(clients, members.get(i).getAsJsonObject());
      }
      return kind.equals("red") ? client.getRedLock(locks) : client.getMultiLock(locks);
    }
    String name = description.get("name").getAsString();
    if (kind.equals("group")) { // not every version has it
      List<Object> values = new ArrayList<>();
      for (JsonElement value : description.getAsJsonArray("values")) {
        JsonPrimitive of = value.getAsJsonPrimitive();
        values.add(of.isNumber() ? (Object) of.getAsLong() : of.getAsString());
      }
      Method get = RedissonClient.class.getMethod("getMultiLock", String.class, Collection.class);
      return get.invoke(client, name, values);
    }
    return find(client, kind, name);
  }

  static Object find(RedissonClient client, String kind, String name) throws ReflectiveOperationException {
    return switch (kind) {
      case "lock" -> client.getLock(name);
      case "fenced" -> client.getFencedLock(name);
      case "spin" -> client.getSpinLock(name);
      case "fair" -> client.getFairLock(name);
      case "read" -> client.getReadWriteLock(name).readLock();
      case "write" -> client.getReadWriteLock(name).writeLock();
      case "semaphore" -> client.getSemaphore(name);
      case "permits" -> client.getPermitExpirableSemaphore(name);
      case "latch" -> client.getCountDownLatch(name);
      case "rate" -> client.getRateLimiter(name);
      // Not every version has these.
      case "non-reentrant" -> invoke(client, "getNonReentrantLock", named(name));
      case "non-reentrant fair" -> invoke(client, "getNonReentrantFairLock", named(name));
      default -> throw new IllegalArgumentException("no kind " + kind);
    };
  }

  private static JsonArray named(String name) {
    JsonArray args = new JsonArray();
    args.add(name);
    return args;
  }

  /** Calls the method of that name that takes such arguments. */
  static Object invoke(Object object, String name, JsonArray args) throws ReflectiveOperationException {
    for (Method method : object.getClass().getMethods()) {
      Class<?>[] types = method.getParameterTypes();
      if (!method.getName().equals(name) || !take(types, args)) {
        continue;
      }
      Object[] values = new Object[types.length];
      for (int i = 0; i < types.length; i++) {
        JsonElement arg = args.get(i);
        values[i] =
            types[i] == Duration.class
                ? Duration.ofMillis(arg.getAsJsonObject().get("ms").getAsLong())
                : GSON.fromJson(arg, types[i]);
      }
      return method.invoke(object, values);
    }
    throw new NoSuchMethodException(object.getClass().getSimpleName() + "." + name + args);
  }

  private static boolean take(Class<?>[] types, JsonArray args) {
    if (types.length != args.size()) {
      return false;
    }
    for (int i = 0; i < types.length; i++) {
      if (!takes(types[i], args.get(i))) {
        return false;
      }
    }
    return true;
  }

  private static boolean takes(Class<?> type, JsonElement arg) {
    if (arg.isJsonArray()) {
      return type == List.class;
    }
    if (arg.isJsonObject()) {
      return type == Duration.class;
    }
    JsonPrimitive value = arg.getAsJsonPrimitive();
    return value.isNumber() ? type == int.class || type == long.class : type == String.class || type.isEnum();
  }
}
